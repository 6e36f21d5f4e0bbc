"""The process group: backend, devices, threads, joining and leaving."""

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# DDP imports this module, whose functions take the group of that moment for a default and so keep it alive: imported
# before there is a group, they do not, and gloo's threads end with it. Else one of them could abort the interpreter
# at its end, by letting go of a tensor then.
import torch.distributed.nn

from common import faults, launch, meeting
from common.errors import RunError, process
from common.launch import Ranks, local_devices, resolve_backend, torchrun_command
from common.ranks import say, this_machine


def prepare(args, device, ranks=None):
    """Set this process's dtype, threads, current device and seed. Call it before the model is made.

    Raises `UserError` where a launcher started a script that needs one process, and so gives no `ranks`.
    """
    if ranks is None:
        launch.refuse_launcher()
        ranks = Ranks()
    process.local_rank = ranks.local_rank
    torch.set_default_dtype(torch.float64 if args.precision == "fp64" else torch.float32)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if ranks.launcher == "srun" and "SLURM_CPUS_PER_TASK" in os.environ:
        share = int(os.environ["SLURM_CPUS_PER_TASK"])
    else:
        # mp.spawn would let each process use all cores, torchrun sets OMP_NUM_THREADS=1.
        share = usable // ranks.local_world_size
    torch.set_num_threads(args.threads or max(1, share))
    # Once a block of this size was freed, glibc keeps what is freed from then on; else it may give the activations
    # back to the kernel after each step, and fetch them again page by page.
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    torch.manual_seed(args.seed)


def join(args, ranks=None, each=1):
    """Join the process group and return this process's device, or a list of them where there are more than one `each`.

    ranks: the place of this process; by default what the launcher's environment says. See `meeting` for what it raises.
    """
    ranks = ranks or launch.ranks_from_environment(args)
    args.backend = resolve_backend(args.backend, args.device)
    devices = local_devices(args, ranks, each)
    setup(args, ranks, devices)
    spare = 0 if args.device == "cpu" else torch.accelerator.device_count() - each * ranks.local_world_size
    if each > 1 and spare > 0:
        say(f"{spare} of the devices here left over: {each} for each process")
    if each > 1 and spare < 0:
        say(f"one device here: all parts of the model are on {devices[0]}")
    return devices if each > 1 else devices[0]


def setup(args, ranks, devices):
    """Join the process group. See `meeting` for what it raises.

    Returns (the store, the host that serves it or None, the address by which the others reach this process).
    """
    if ranks.one_machine:
        # By itself gloo listens on the address of the host's name, NCCL on any interface.
        for _, name in socket.if_nameindex() if sys.platform != "win32" else []:
            if name in ("lo", "lo0"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    prepare(args, devices[0], ranks)
    timeout = timedelta(seconds=args.timeout)
    # NCCL takes tensors on no other device than the one it is bound to: a model over two leaves it unbound.
    bound = args.device != "cpu" and len(set(devices)) == 1 and args.backend != "gloo"
    store, host = meeting.open_store(ranks, ranks.init_method, timeout)
    address = meeting.meet(store, host, ranks, args)
    if ranks.world_size > 1:
        process.watch = faults.Watch(store, ranks, args.timeout)
        process.watch.begin(args.backend)
    try:
        dist.init_process_group(
            args.backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
            device_id=devices[0] if bound else None,
        )
    except RuntimeError as error:
        if ranks.one_machine:
            raise
        raise RunError(
            f"{this_machine()}: the ranks did not connect ({str(error).partition(chr(10))[0]}): one of them "
            "failed meanwhile, or not all ports are open between the machines"
        ) from None
    process.at_end.callback(leave)
    threads = torch.get_num_threads()
    say(f"world size {ranks.world_size}, device {args.device}, backend {args.backend}, threads per process {threads}")
    if ranks.launcher is None:
        accelerators = 0 if args.device == "cpu" else torch.accelerator.device_count()
        say(f"to start a process per device: {torchrun_command(accelerators or 2)}")
    return store, host, address


def leave():
    """Leave the process group together. Only after success: with a rank gone it could wait for ever.

    Raises `RunError` where ranks ended their training at different steps.
    """
    if process.watch and (line := process.watch.end_together()):
        raise RunError(line)
    process.watch = None
    process.group = dist.group.WORLD
    dist.destroy_process_group()

"""The process group: device and backend, threads, joining and leaving, wiring, and what the ranks tell each other."""

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

from common import faults, machines, meeting
from common.launch import Ranks, RunError, UserError, released_last, torchrun_command

_ranks = Ranks()  # this process's, from `prepare` on


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank():
    """The rank on this machine."""
    return _ranks.local_rank


def say(line):
    """Print a line from rank 0, in one piece, so that it mixes with no other process's."""
    if rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


# ------------------------------------------------------------------------------------------ device, backend


def resolve_device(name):
    """The device type that `--device` means here, such as "cpu" or "cuda". Raises `UserError` where it is not here."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        # Apple's mps has neither float64 nor collectives of its own, so it is taken only when asked for.
        return found.type if found and found.type != "mps" else "cpu"
    if name != "cpu" and (found is None or found.type != name):
        have = f"cpu and {found.type}" if found else "cpu"
        raise UserError(f"--device {name}: this torch finds {have} here; name a kind, without an index")
    return name


def resolve_backend(name, device_type):
    """The backend that `--backend` means here. Raises `UserError` where torch lacks it or the device is not for it."""
    if name == "auto":
        name = dist.get_default_backend_for_device(device_type)
    known = set(dist.Backend.backend_list) - {"fake", "undefined"}
    have = {backend for backend in known if dist.is_backend_available(backend)}
    if name not in have:
        raise UserError(f"--backend {name}: this torch has {', '.join(sorted(have))}")
    if device_type not in dist.Backend.backend_capability.get(name, [device_type]):
        kinds = " or ".join(dist.Backend.backend_capability[name])
        raise UserError(f"--backend {name} works on {kinds}, not on {device_type}: leave it out, or use gloo")
    return name


def local_devices(args, ranks, each=1):
    """The `each` devices of this process, chosen by its local rank so that no two processes share one.

    Raises `UserError` where the machine shows too few for its processes.
    """
    if args.device == "cpu":
        return [torch.device("cpu")] * each
    visible = torch.accelerator.device_count()
    needed = ranks.local_world_size * each
    first = ranks.local_rank * each
    if visible == ranks.local_world_size == 1:
        return [torch.device(args.device, 0)] * each  # nothing to choose: one process, one device
    if visible < needed:
        if ranks.launcher not in ("srun", "mpirun") or visible != each:
            raise UserError(
                f"{ranks.local_world_size} processes with {each} {args.device} device(s) each need {needed}, "
                f"this machine shows {visible}: start fewer processes, or use --device cpu"
            )
        first = 0  # the launcher shows each process just its own
    return [torch.device(args.device, first + index) for index in range(each)]


def default_processes(args, each=1):
    """How many processes to start here: `--nprocs`, or what the accelerators allow, or 2 on a CPU.

    Raises `UserError` where there are more processes than devices.
    """
    nprocs = args.nprocs or (2 if args.device == "cpu" else max(1, torch.accelerator.device_count() // each))
    local_devices(args, Ranks(world_size=nprocs, local_world_size=nprocs), each)
    return nprocs


def prepare(args, ranks, device):
    """Set this process's dtype, threads and current device. Call it before the model is made."""
    global _ranks
    _ranks = ranks
    if args.precision == "fp64":
        torch.set_default_dtype(torch.float64)
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


# ------------------------------------------------------------------------------------------ joining, leaving


def setup(args, ranks, devices, init_method):
    """Join the process group. See `meeting` for what it raises.

    Returns (the store, the host that serves it or None, the address by which the others reach this process).
    """
    if ranks.one_machine:
        # By itself gloo listens on the address of the host's name, NCCL on any interface.
        for _, name in socket.if_nameindex() if sys.platform != "win32" else []:
            if name in ("lo", "lo0"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    prepare(args, ranks, devices[0])
    timeout = timedelta(seconds=args.timeout)
    # NCCL takes tensors on no other device than the one it is bound to: a model over two leaves it unbound.
    bound = args.device != "cpu" and len(set(devices)) == 1 and args.backend != "gloo"
    store, host = meeting.open_store(ranks, init_method, timeout)
    address = meeting.meet(store, host, ranks, args)
    if ranks.world_size > 1:
        faults.watch = faults.Watch(store, ranks, args.timeout)
        faults.watch.begin(args.backend)
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
            f"{meeting.this_machine()}: the ranks did not connect ({str(error).partition(chr(10))[0]}): one of them "
            "failed meanwhile, or not all ports are open between the machines"
        ) from None
    threads = torch.get_num_threads()
    say(f"world size {world_size()}, device {args.device}, backend {args.backend}, threads per process {threads}")
    if ranks.launcher is None:
        accelerators = 0 if args.device == "cpu" else torch.accelerator.device_count()
        say(f"to start a process per device: {torchrun_command(accelerators or 2)}")
    return store, host, address


def cleanup():
    """Leave the process group together. Only after success: with a rank gone it could wait for ever.

    Raises `RunError` where ranks ended their training at different steps.
    """
    if faults.watch and (line := faults.watch.end_together()):
        raise RunError(line)
    faults.watch = None
    if dist.is_initialized():
        released_last.append(dist.group.WORLD)
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------ among the ranks


def total(tensor):
    """The sum of a tensor over the ranks, as a new tensor."""
    tensor = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def gather(row, device):
    """Every rank's row of n numbers: float64 [world size, n], on the CPU."""
    rows = torch.zeros(world_size(), len(row), dtype=torch.float64, device=device)
    rows[rank()] = torch.as_tensor(row, dtype=torch.float64)
    return total(rows).cpu()


def most(row, device):
    """The greatest of each of n numbers over the ranks, in a list. Its cost hardly grows with the world size."""
    row = torch.tensor(row, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(row, dist.ReduceOp.MAX)
    return row.tolist()


def gather_objects(value, everywhere=True):
    """Every rank's value, anything that pickle takes, in a list; where not everywhere, None but on rank 0."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size() if everywhere or rank() == 0 else None
    if everywhere:
        dist.all_gather_object(values, value)
    else:
        dist.gather_object(value, values)
    return values


def from_rank(source, function):
    """Call `function` on rank `source`; every rank returns what it returned or raises the `RunError` that it raised."""
    answer = [None, None]
    if rank() == source:
        try:
            answer[0] = function()
        except RunError as error:
            answer[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(answer, source)
    if answer[1]:
        raise answer[1]
    return answer[0]


def check_same(what, value):
    """Raise `UserError` on all ranks where they have different values; it names the machines."""
    there = gather_objects((value, meeting.this_machine()))
    if found := machines.differences(*zip(*there, strict=True)):
        raise UserError(f"{what} is {found}: it must be the same everywhere")


def share_buffers(model):
    """Give every rank rank 0's buffers, such as running means, which only DDP's next forward would do."""
    for buffer in model.buffers() if dist.is_initialized() else []:
        dist.broadcast(buffer, src=0)


def check_same_weights(model, device):
    """Raise `RunError` where a rank's parameters differ from rank 0's; it names the ranks."""
    names, sums = [], []
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().double()
        names.append(name)
        sums += [values.sum(), values.abs().sum()]
    sums = torch.stack(sums).nan_to_num(nan=-1).view(-1, 2)
    first = sums.to(device, copy=True)
    if dist.is_initialized():
        dist.broadcast(first, 0)
    first = first.cpu()
    # A sum's last digits may depend on the kind of processor; a rank that went its own way differs by far more.
    differs = ((sums - first).abs() > 1e-12 * first[:, 1:]).any(1).nonzero().flatten().tolist()
    found = gather([differs[0] + 1 if differs else 0], device).flatten().long().tolist()
    if ranks := [rank for rank, number in enumerate(found) if number]:
        name = names[min(found[rank] for rank in ranks) - 1]
        some = ", ".join(map(str, ranks[:8])) + f" and {len(ranks) - 8} more" * (len(ranks) > 8)
        raise RunError(f"the weights of rank {some} differ from those of rank 0, first in {name}")

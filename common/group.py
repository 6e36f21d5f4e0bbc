"""The process group: backend, devices, threads, joining and leaving."""

import os
import shlex
import socket
import sys
from datetime import timedelta

from common import meeting
from common.errors import RunError, process
from common.place import local_devices, resolve_backend
from common.ranks import say, this_machine
from common.start import prepare
from common.watch import Watch

import torch
import torch.distributed as dist

# DDP imports this module, whose functions take the group of that moment for a default and so keep it alive: imported
# before there is a group, they do not, and gloo's threads end with it. Else one of them could abort the interpreter
# at its end, by letting go of a tensor then.
import torch.distributed.nn


def join(args, ranks=None, each=1):
    """Join the process group and return this process's device, or a list of them where there are more than one `each`.

    ranks: the place of this process; by default what the launcher's environment says. See `meeting` for what it raises.
    """
    if ranks is None:
        from common.launchers import ranks_from_environment  # not needed under mp.spawn

        ranks = ranks_from_environment(args)
    args.backend = resolve_backend(args.backend, args.device)
    devices = local_devices(args, ranks, each)
    process.node = ranks.node
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
    host = None  # of the store
    if ranks.launcher is None:
        store = dist.HashStore()  # alone: no port is needed
    elif ranks.init_method.startswith("file:"):
        store = next(dist.rendezvous(ranks.init_method, ranks.rank, ranks.world_size))[0]
    else:
        from common.store import open_tcp  # not needed where no port is

        store, host = open_tcp(ranks, timeout)
    watch = process.watch or Watch(store, ranks)
    watch.announce(ranks.rank, os.getpid())
    process.address = meeting.meet(store, host, ranks, args)
    if ranks.world_size > 1 or watch.has_parent:
        process.watch = watch
        watch.begin(args)
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
    process.at_end.append(leave)
    threads = torch.get_num_threads()
    say(f"world size {ranks.world_size}, device {args.device}, backend {args.backend}, threads per process {threads}")
    there, needed = 0 if args.device == "cpu" else torch.accelerator.device_count(), each * ranks.local_world_size
    if ranks.launcher is None:
        command = shlex.join(["torchrun", f"--nproc_per_node={there or 2}", *sys.argv])
        say(f"to start a process per device: {command}")
    if each > 1 and there > needed:
        say(f"{there - needed} of the devices here left over: {each} for each process")
    if each > 1 and there < needed:
        say(f"one device here: all parts of the model are on {devices[0]}")
    return devices if each > 1 else devices[0]


def leave():
    """Leave the process group together. Only after success: with a rank gone it could wait for ever.

    Raises `RunError` where ranks ended their training at different steps.
    """
    if watch := process.watch:
        if line := watch.end_together():
            raise RunError(line)
        watch.stay()
    process.watch = None
    process.backends = [dist.group.WORLD._get_backend(device) for device in dist.group.WORLD._device_types]
    dist.destroy_process_group()

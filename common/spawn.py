"""One machine: a parent starts the ranks by mp.spawn, tells them how one of them ended, and ends them."""

import os
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from pathlib import Path

from common.errors import process, stop_signals, write_error
from common.judge import examine
from common.place import Ranks, local_devices, resolve_backend
from common.start import die_with_parent, refuse_launcher
from common.watch import Watch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@contextmanager
def spawning(args, each=1):
    """Yield the path of a fresh file in which the ranks meet; on the way out, whatever the reason, end all children.

    Sets `args.nprocs`: by default what the accelerators allow, with `each` for a process, or 2 on a CPU.
    Raises `UserError` where there are more processes than devices, or torch lacks the backend.
    With a snapshot, the first SIGTERM or Ctrl-C is passed on to the ranks, who save and stop by themselves.
    """
    if not hasattr(args, "init_method"):  # else the script has asked for a launcher's ranks
        refuse_launcher()
    resolve_backend(args.backend, args.device)
    there = 0 if args.device == "cpu" else torch.accelerator.device_count()
    args.nprocs = args.nprocs or (2 if args.device == "cpu" else max(1, there // each))
    local_devices(args, Ranks(world_size=args.nprocs, local_world_size=args.nprocs), each)
    received_at = None

    def stop(number, frame):
        nonlocal received_at
        if received_at is None and args.snapshot:
            received_at = time.monotonic()
            signal_children(number)
        elif not args.snapshot or time.monotonic() - received_at > 1:  # not the same Ctrl-C, sent twice
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    # Set for SIGINT as well: a shell that starts a script in the background lets it ignore SIGINT.
    signals = {number: signal.signal(number, stop) for number in stop_signals()}
    if in_memory := hasattr(os, "memfd_create"):  # Linux; nothing is left of it where this process is killed
        file = os.memfd_create("ddp")
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="ddp-")
    hold_signals(True)
    try:
        yield path
    finally:
        hold_signals(False)
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        children = signal_children(signal.SIGINT)  # lets them end their loader workers and remove their files
        end = time.monotonic() + 3
        for child in children:
            child.join(max(0, end - time.monotonic()))
            child.kill()
            child.join()
        os.close(file)
        if not in_memory:
            Path(path).unlink(missing_ok=True)
        for number, handler in signals.items():
            signal.signal(number, handler)


def signal_children(number):
    """Send a signal to the processes that this one started, and return them."""
    children = mp.active_children()
    for child in children if sys.platform != "win32" else []:
        os.kill(child.pid, number)
    return children


def hold_signals(yes):
    """Hold the signals that stop a run until they can be handled: a rank inherits this, and imports torch meanwhile."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        resource_tracker.ensure_running()  # started with a rank, it would let them through
        signal.pthread_sigmask(signal.SIG_BLOCK if yes else signal.SIG_UNBLOCK, stop_signals())


def spawned(rank, world_size, path):
    """The `Ranks` of a process that mp.spawn started; they meet in a file, so that no port is opened for it.

    Also sets the variables that torchrun sets, and lets the parent know how it ends; see `wait_for_ranks`.
    """
    die_with_parent()  # first: without it the file is gone, and torch would wait for it
    places = rank, world_size, rank, world_size
    ranks = Ranks(*places, "mp.spawn", f"file://{path}")
    watch = process.watch = Watch(dist.FileStore(path, -1), ranks)
    signal.signal(signal.SIGINT, watch.receive)
    hold_signals(False)
    mp.set_start_method(None, force=True)  # else loader workers are spawned too, and each imports torch anew
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, places), strict=True))
    process.at_end.append(lambda: watch.store.set(f"finished {rank}", ""))
    return ranks


def wait_for_ranks(context, path):
    """Wait for the ranks of `mp.spawn(…, join=False)`. Where one fails, tell of it, end all, and exit with its status.

    mp.spawn takes any exit with status 0 for success; here a rank must have let it know that it finished.
    """
    hold_signals(False)
    children, count = context.processes, len(context.processes)
    watch = Watch(dist.FileStore(path, -1), Ranks(world_size=count, local_world_size=count), children)
    while "gone" not in (states := [watch.state(rank) for rank in range(count)]) and set(states) != {"finished"}:
        running = [child for child, state in zip(children, states, strict=True) if state != "finished"]
        connection.wait([child.sentinel for child in running])
    status = max(child.exitcode or 0 for child in children)
    if "gone" in states:
        line, details, status = examine(watch)
        if line:
            write_error(line, details)
    if status:
        sys.exit(status)

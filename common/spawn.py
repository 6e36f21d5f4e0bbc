"""One machine: a parent starts the ranks by mp.spawn, tells them how one of them ended, and ends them."""

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from pathlib import Path

from common import faults
from common.errors import die_with_parent, process, stop_signals, write_error
from common.place import Ranks, local_devices, resolve_backend
from common.start import refuse_launcher

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@contextmanager
def spawning(args, each=1):
    """Yield a fresh directory, of mode 0700; on the way out, whatever the reason, end all children and remove it.

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
            for child in mp.active_children() if sys.platform != "win32" else []:
                os.kill(child.pid, number)
        elif not args.snapshot or time.monotonic() - received_at > 1:  # not the same Ctrl-C, sent twice
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    # Set for SIGINT as well: a shell that starts a script in the background lets it ignore SIGINT.
    signals = {number: signal.signal(number, stop) for number in stop_signals()}
    directory = tempfile.mkdtemp(prefix="ddp-")
    tempfile.tempdir = directory  # mp.spawn leaves error files of failed ranks behind
    hold_signals(True)
    try:
        yield directory
    finally:
        hold_signals(False)
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        children = mp.active_children()
        for child in children if sys.platform != "win32" else []:
            os.kill(child.pid, signal.SIGINT)  # lets it end its loader workers and remove their files
        end = time.monotonic() + 3
        for child in children:
            child.join(max(0, end - time.monotonic()))
            child.kill()
            child.join()
        tempfile.tempdir = None
        shutil.rmtree(directory)
        for number, handler in signals.items():
            signal.signal(number, handler)


def hold_signals(yes):
    """Hold the signals that stop a run until they can be handled: a rank inherits this, and imports torch meanwhile."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        resource_tracker.ensure_running()  # started with a rank, it would let them through
        signal.pthread_sigmask(signal.SIG_BLOCK if yes else signal.SIG_UNBLOCK, stop_signals())


def spawned(rank, world_size, directory):
    """The `Ranks` of a process that mp.spawn started; they meet in a file, so that no port is opened for it.

    Also sets the variables that torchrun sets, and lets the parent know when all went well; see `wait_for_ranks`.
    """

    def interrupt(number, frame):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches this process from the terminal and from the parent
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    hold_signals(False)
    die_with_parent()
    mp.set_start_method(None, force=True)  # else loader workers are spawned too, and each imports torch anew
    process.at_end.callback(Path(directory, f"finished.{rank}").touch)
    places = rank, world_size, rank, world_size
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, places), strict=True))
    return Ranks(*places, "mp.spawn", f"file://{directory}/store", has_parent=True)


def wait_for_ranks(context, directory):
    """Wait for the ranks of `mp.spawn(…, join=False)`. Where one fails, tell of it, end all, and exit with its status.

    mp.spawn takes any exit with status 0 for success; here a rank must have reported that it finished.
    """
    hold_signals(False)
    processes = context.processes
    # Opened before the ranks end, the last of which would remove it.
    everyone = Ranks(world_size=len(processes), local_world_size=len(processes))
    watch = faults.Watch(dist.FileStore(f"{directory}/store", -1), everyone)

    def running():
        return {rank: process for rank, process in enumerate(processes) if process.exitcode is None}

    def failed():
        """{rank: exit code}; Python writes a signal's number as a negative one."""
        codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode is not None}
        return {rank: code for rank, code in codes.items() if code or not Path(directory, f"finished.{rank}").exists()}

    while (alive := running()) and not failed():
        connection.wait([process.sentinel for process in alive.values()])
    if not failed():
        return
    # The ranks judge and tell. How one of them ended, this process alone can say.
    codes, end = {}, time.monotonic() + 2 * faults.PATIENCE
    while True:
        for rank, code in failed().items():
            ours = code == -9 and watch.has_killed()  # SIGKILL, which Windows lacks: it was stuck
            if rank not in codes and not ours:
                codes[rank] = code
                told = {130, 143} if watch.has_met(rank) else {1, 2, 130, 143}  # before, each told of its own fault
                if code not in told and rank not in watch.reports():
                    watch.report("gone", _how(code), gone=rank)
        left = running()
        if all(watch.state(rank) == "stopped" for rank in left) or time.monotonic() > end:
            break
        connection.wait([process.sentinel for process in left.values()], 0.1)
    reports = watch.reports()
    blamed, line = faults.judge(watch, reports, {rank: watch.state(rank) for rank in left if reports})
    faults.show_and_kill([process.pid for process in left.values()])
    if line and watch.first():  # no rank was left to tell
        write_error(line)
    code = codes.get(blamed, next(iter(codes.values()), 1)) or 1
    sys.exit(code if code > 0 else 128 - code)


def _how(code):
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"left with status {code} before its training was finished"

"""The start of a process: what the options mean on this machine, and what it sets."""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import threading
import warnings
from pathlib import Path

from common.errors import UserError, describe, launcher, stop_signals

import torch
import torch.multiprocessing as mp


def resolve(args):
    """Make `args.device` the device type that it means here, such as "cuda"; set `args.dtype`, autocast's or None.

    Raises `UserError` where this machine lacks the device, the precision on it, or what `--compile` needs.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if args.device == "auto":
        # Apple's mps has neither float64 nor collectives of its own, so it is taken only when asked for.
        args.device = found.type if found and found.type != "mps" else "cpu"
    if args.device != "cpu" and (found is None or found.type != args.device):
        have = f"cpu and {found.type}" if found else "cpu"
        raise UserError(f"--device {args.device}: this torch finds {have} here; name a kind, without an index")
    args.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns, and goes on in fp32
            torch.autocast(args.device, args.dtype, enabled=args.dtype is not None)
    except (RuntimeError, Warning) as error:
        raise UserError(f"--precision {args.precision} on {args.device}: {describe(error)}") from None
    compiler = (os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")).split()[0]
    if args.compile and args.device == "cpu" and sys.platform != "win32" and not shutil.which(compiler):
        raise UserError(f"--compile needs a C++ compiler, and there is no {compiler}: install it, or set CXX")


def prepare(args, device, ranks=None):
    """Set this process's dtype, threads, current device and seed. Call it before the model is made.

    Raises `UserError` where a launcher started a script that needs one process, and so gives no `ranks`.
    """
    if ranks is None:
        refuse_launcher()
    torch.set_default_dtype(torch.float64 if args.precision == "fp64" else torch.float32)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # mp.spawn would let each process use all cores, torchrun sets OMP_NUM_THREADS=1.
    share = (ranks.cpus or usable // ranks.local_world_size) if ranks else usable
    torch.set_num_threads(args.threads or max(1, share))
    # Once a block of this size was freed, glibc keeps what is freed from then on; else it may give the activations
    # back to the kernel after each step, and fetch them again page by page.
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    torch.manual_seed(args.seed)


def refuse_launcher():
    """Raise `UserError` where a launcher started a script that starts its own processes or needs just one."""
    if name := launcher():
        script = Path(sys.argv[0]).name
        raise UserError(f"{script} was started by {name}: start it by `python {script}`, or take ddp_torchrun.py")


def die_with_parent():
    """End this process when its parent is gone: at once on Linux, elsewhere where Python knows the parent."""
    parent = mp.parent_process()
    if sys.platform == "linux" and (parent is None or parent.pid == os.getppid()):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if parent and not parent.is_alive():
            os._exit(1)  # it was gone already
    elif parent:  # also a loader worker that a fork server started, as Python 3.14 has it

        def follow():
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def signals_held():
    """Hold the signals that stop a run while processes are forked: Python drops what a handler raises then."""
    held, main = [], threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, lambda *got: held.append(got[0])) for number in stop_signals() if main}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in held[:1]:
            signal.raise_signal(number)

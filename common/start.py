"""What each process does before it meets others: whether a launcher started it, what it sets, how it tells an error."""

import json
import os
import sys
import time
from pathlib import Path

from common.errors import UserError, process, tell_alone, write_error

import torch
import torch.multiprocessing as mp


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


def launcher():
    """The name of what started this process, or None; a user's own RANK counts as torchrun's."""
    if "RANK" in os.environ:
        return "torchrun"
    # A single task is as good as none: most often an interactive shell, where any script may be started. A batch
    # script has a rank too, but no step and so no number of tasks in it.
    for name, rank, size in [
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ]:
        if rank in os.environ and os.environ.get(size, "1") != "1":
            return name
    return None


def refuse_launcher():
    """Raise `UserError` where a launcher started a script that starts its own processes or needs just one."""
    if name := launcher():
        script = Path(sys.argv[0]).name
        raise UserError(f"{script} was started by {name}: start it by `python {script}`, or take ddp_torchrun.py")


def tell_before_meeting(error):
    """Tell of the exception that ends a process, once on each machine. Returns the exit status."""
    if not hasattr(error, "exit_status"):
        return tell_alone(error)
    told = filter(None, map(os.environ.get, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")))
    first = next(told, "0") == "0" or not launcher()
    waited_for = launcher() == "srun" or mp.parent_process() is not None  # these let each process speak
    if not first and (launcher() == "mpirun" or "TORCHELASTIC_RUN_ID" in os.environ):
        # These end all as soon as one has ended, and the first process of this machine shall tell the error before.
        # Where none ends this one meanwhile, the error is its own.
        time.sleep(10)
    if first or not waited_for:
        write_error(str(error))
    leave_for_torchrun(str(error))
    return error.exit_status


process.tell = tell_before_meeting


def leave_for_torchrun(line, later=0):
    """Let torchrun's summary show this. What is the earliest there it calls the root cause; later: seconds."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()) + later)}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))

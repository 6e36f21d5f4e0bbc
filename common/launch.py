"""How a process came to be: its ranks from the launcher's environment, or a parent that spawns ranks and ends them."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common import faults, machines
from common.errors import UserError, die_with_parent, process, tell_alone, write_error

# Which variables tell rank, world size, local rank and local world size.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def tell(error):
    """Tell of the exception that ends a process, which a launcher may have started. Returns the exit status."""
    if process.watch:
        status = faults.tell(error)
    elif hasattr(error, "exit_status"):
        status = _tell_before_meeting(error)
    else:
        return tell_alone(error)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and status == UserError.exit_status and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun would try again and again what cannot succeed
    return status


def _tell_before_meeting(error):
    name = launcher()
    local_rank = os.environ.get(LAUNCHERS[name][2], "0") if name else "0"
    first = not local_rank.isdecimal() or int(local_rank) == 0
    waited_for = name == "srun" or mp.parent_process() is not None  # srun and `wait_for_ranks` let it speak
    if not first and not waited_for:
        # torchrun and mpirun end all as soon as one has ended, and the first process of this machine shall tell the
        # error before. Where none ends this one meanwhile, the error is its own.
        time.sleep(10)
    if first or not waited_for:
        write_error(str(error))
    faults.leave_for_torchrun(str(error))
    return error.exit_status


process.tell = tell


# ------------------------------------------------------------------------------------- started by a launcher


@dataclass(frozen=True)
class Ranks:
    """The place of a process among all processes, and among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str | None = None
    init_method: str = "env://"  # how the ranks find each other

    @property
    def one_machine(self):
        return self.local_world_size == self.world_size


def launcher():
    """The key in `LAUNCHERS` of what started this process, or None; a user's own RANK counts as torchrun's."""
    if "RANK" in os.environ:
        return "torchrun"
    for name in ("mpirun", "srun"):
        # A single task is as good as none: most often an interactive shell, where any script may be started. A batch
        # script has a rank too, but no step and so no number of tasks in it.
        rank, size = LAUNCHERS[name][:2]
        if rank in os.environ and os.environ.get(size, "1") != "1":
            return name
    return None


def refuse_launcher():
    """Raise `UserError` where a launcher started a script that starts its own processes or needs just one."""
    if launcher():
        script = Path(sys.argv[0]).name
        raise UserError(f"{script} was started by {launcher()}: start it by `python {script}`, or take ddp_torchrun.py")


def torchrun_command(nproc):
    """The command that starts this script, with its arguments, as `nproc` processes."""
    return shlex.join(["torchrun", f"--nproc_per_node={nproc}", *sys.argv])


def ranks_from_environment(args):
    """The `Ranks` that torchrun, mpirun, srun or the user's variables give this process; without any, one process.

    Where mpirun and srun leave MASTER_ADDR and MASTER_PORT out, sets them for env://.
    Raises `UserError` where variables are missing, are not numbers or contradict each other.
    """
    env, name = os.environ, launcher()
    needed = ["RANK", "WORLD_SIZE"] + ["MASTER_ADDR", "MASTER_PORT"] * (args.init_method == "env://")
    missing = [variable for variable in needed if not env.get(variable)]
    if name is None and len(missing) == len(needed):
        return Ranks()
    if getattr(args, "nprocs", None):
        raise UserError(f"--nprocs {args.nprocs}: {name} has started the processes, leave it out")
    if "TORCHELASTIC_RUN_ID" in env or name == "mpirun":
        die_with_parent()  # a killed torchrun or mpirun would leave its processes running
    if name in (None, "torchrun") and missing:
        found = ", ".join(variable for variable in needed if env.get(variable))
        raise UserError(f"the environment has {found} but lacks {', '.join(missing)}: set them, or start with torchrun")

    rank, world_size = (_number(variable) for variable in LAUNCHERS[name][:2])
    local_rank, local_world_size = _local_ranks(name, rank, world_size, args)
    for what, number, below in [
        ("rank", rank, world_size),
        ("local rank", local_rank, local_world_size),
        ("local world size", local_world_size, world_size + 1),
    ]:
        if not 0 <= number < below:
            raise UserError(f"{what} is {number} but must be from 0 to {below - 1}: see {', '.join(LAUNCHERS[name])}")
    if args.init_method == "env://":
        if name != "torchrun":
            _set_master(name, one_machine=local_world_size == world_size)
        if not 0 < _number("MASTER_PORT") < 2**16:
            raise UserError(f"the environment's MASTER_PORT is {env['MASTER_PORT']}, not from 1 to 65535")
    return Ranks(rank, world_size, local_rank, local_world_size, name, args.init_method)


def _local_ranks(name, rank, world_size, args):
    """(local rank, local world size)"""
    if name == "srun":
        # "2(x3),1" stands for two tasks on each of three nodes and one on the fourth.
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        tasks = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
        node = _number("SLURM_NODEID")
        if not 0 <= node < len(tasks):
            raise UserError(
                f"the environment's SLURM_NODEID is {node}, SLURM_STEP_TASKS_PER_NODE tells of {len(tasks)}"
            )
        return _number("SLURM_LOCALID"), tasks[node]
    # Started by hand these may be missing: a loopback address says that all processes are here.
    variable, size = LAUNCHERS[name][2:]
    master = urlsplit(args.init_method).hostname or os.environ.get("MASTER_ADDR", "")
    all_here = world_size == 1 or machines.is_loopback(master)
    if variable in os.environ or args.local_rank is not None:
        local_rank = _number(variable, args.local_rank)
    elif all_here or args.device == "cpu":
        local_rank = rank if all_here else 0
    else:
        raise UserError("the environment lacks LOCAL_RANK, which picks the device: 0 for a machine's first process, …")
    return local_rank, _number(size, world_size if all_here else local_rank + 1)


def _set_master(name, one_machine):
    env = os.environ
    if one_machine:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
    elif "MASTER_ADDR" not in env and name == "srun":
        hosts = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        env["MASTER_ADDR"] = subprocess.run(hosts, capture_output=True, text=True, check=True).stdout.split()[0]
    elif "MASTER_ADDR" not in env:
        raise UserError("the environment lacks MASTER_ADDR: start with `mpirun -x MASTER_ADDR=FIRST_MACHINE …`")
    # All processes of a job must come to the same port, two jobs on a machine to different ones.
    job = env.get("PMIX_NAMESPACE", "") if name == "mpirun" else f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    env.setdefault("MASTER_PORT", str(10000 + zlib.crc32(job.encode()) % 20000))


def _number(variable, default=None):
    value = os.environ.get(variable, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UserError(f"the environment's {variable} is {value!r}, not a number") from None


# ----------------------------------------------------------------------------------------- backend, devices


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


# ------------------------------------------------------------------------------------------ started by spawn


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
    signals = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    directory = tempfile.mkdtemp(prefix="ddp-")
    tempfile.tempdir = directory  # mp.spawn leaves error files of failed ranks behind
    try:
        yield directory
    finally:
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


def spawned(rank, world_size, directory):
    """The `Ranks` of a process that mp.spawn started; they meet in a file, so that no port is opened for it.

    Also sets the variables that torchrun sets, and lets the parent know when all went well; see `wait_for_ranks`.
    """

    def interrupt(number, frame):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches this process from the terminal and from the parent
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    die_with_parent()
    mp.set_start_method(None, force=True)  # else loader workers are spawned too, and each imports torch anew
    process.at_end.callback(Path(directory, f"finished.{rank}").touch)
    ranks = Ranks(rank, world_size, rank, world_size, "mp.spawn", f"file://{directory}/store")
    os.environ.update(zip(LAUNCHERS["torchrun"], map(str, (rank, world_size, rank, world_size)), strict=True))
    return ranks


def wait_for_ranks(context, directory):
    """Wait for the ranks of `mp.spawn(…, join=False)`. Where one fails, tell of it, end all, and exit with its status.

    mp.spawn takes any exit with status 0 for success; here a rank must have reported that it finished.
    """
    processes = context.processes
    # Opened before the ranks end, the last of which would remove it.
    watch = faults.Watch(dist.FileStore(f"{directory}/store", -1), Ranks(world_size=len(processes)))

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
            ours = code == -signal.SIGKILL and watch.has_killed()  # it was stuck
            if rank not in codes and not ours:
                codes[rank] = code
                told = {130, 143} if watch.has_met(rank) else {1, 2, 130, 143}  # before, each told of its own fault
                if code not in told and rank not in watch.reports():
                    watch.report_gone(rank, _how(code))
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

"""What starts the processes: one function for each launcher, which gives a process its `Ranks`, or None."""

import os
import re
import subprocess
import zlib
from urllib.parse import urlsplit

from common.errors import UserError, launcher
from common.place import Ranks
from common.ranks import is_loopback
from common.start import die_with_parent


def mpirun(args):
    if launcher() != "mpirun":
        return None
    die_with_parent()  # a killed mpirun would leave its processes running
    places = [number(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    rank, world_size, _, local_world_size = places
    if world_size == local_world_size:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    elif args.init_method == "env://" and "MASTER_ADDR" not in os.environ:
        raise UserError("the environment lacks MASTER_ADDR: start with `mpirun -x MASTER_ADDR=FIRST_MACHINE …`")
    choose_port(os.environ.get("PMIX_NAMESPACE", ""))
    return Ranks(*places, "mpirun", args.init_method, rank // local_world_size, own_devices=True)


def srun(args):
    if launcher() != "srun":
        return None
    rank, world_size, node = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS"), number("SLURM_NODEID")
    # "2(x3),1" stands for two tasks on each of three nodes and one on the fourth.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
    if not 0 <= node < len(tasks):
        raise UserError(f"the environment's SLURM_NODEID is {node}, SLURM_STEP_TASKS_PER_NODE tells of {len(tasks)}")
    if world_size == tasks[node]:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    elif args.init_method == "env://" and "MASTER_ADDR" not in os.environ:
        hosts = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        found = subprocess.run(hosts, capture_output=True, text=True, check=True).stdout
        os.environ["MASTER_ADDR"] = found.split()[0]
    choose_port(f"{os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}")
    cpus = number("SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in os.environ else None
    places = rank, world_size, number("SLURM_LOCALID"), tasks[node]
    return Ranks(*places, "srun", args.init_method, node, cpus, own_devices=True)


def torchrun(args):
    """Also torch.distributed.launch, and a user who sets the same variables by hand."""
    env = os.environ
    needed = ["RANK", "WORLD_SIZE"] + ["MASTER_ADDR", "MASTER_PORT"] * (args.init_method == "env://")
    missing = [variable for variable in needed if not env.get(variable)]
    if len(missing) == len(needed):
        return None
    if missing:
        there = ", ".join(variable for variable in needed if variable not in missing)
        raise UserError(f"the environment has {there} but lacks {', '.join(missing)}: set them, or start with torchrun")
    if "TORCHELASTIC_RUN_ID" in env:
        die_with_parent()  # a killed torchrun would leave its processes running
    rank, world_size = number("RANK"), number("WORLD_SIZE")
    # Set by hand these may be missing: a loopback address says that all processes are here.
    master = urlsplit(args.init_method).hostname or env.get("MASTER_ADDR", "")
    all_here = world_size == 1 or is_loopback(master)
    if "LOCAL_RANK" in env or args.local_rank is not None:
        local_rank = number("LOCAL_RANK", args.local_rank)
    elif all_here or args.device == "cpu":
        local_rank = rank if all_here else 0
    else:
        raise UserError("the environment lacks LOCAL_RANK, which picks the device: 0 for a machine's first process, …")
    local_world_size = number("LOCAL_WORLD_SIZE", world_size if all_here else local_rank + 1)
    node = number("GROUP_RANK", rank // max(1, local_world_size))
    serves_store = args.init_method == "env://" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    places = rank, world_size, local_rank, local_world_size
    return Ranks(*places, "torchrun", args.init_method, node, serves_store=serves_store)


LAUNCHERS = [mpirun, srun, torchrun]  # yours comes first: it is asked first


def ranks_from_environment(args):
    """The `Ranks` that a launcher gives this process; without any, one process.

    Raises `UserError` where variables are missing, are not numbers or contradict each other.
    """
    ranks = next(filter(None, (ask(args) for ask in LAUNCHERS)), None)
    if ranks is None:
        return Ranks()
    if getattr(args, "nprocs", None):
        raise UserError(f"--nprocs {args.nprocs}: {ranks.launcher} has started the processes, leave it out")
    if ranks.world_size < 1:
        raise UserError(f"world size is {ranks.world_size} but must be at least 1: see {ranks.launcher}'s variables")
    for what, value, below in [
        ("rank", ranks.rank, ranks.world_size),
        ("local rank", ranks.local_rank, ranks.local_world_size),
        ("local world size", ranks.local_world_size, ranks.world_size + 1),
    ]:
        if not 0 <= value < below:
            raise UserError(f"{what} is {value} but must be from 0 to {below - 1}: see {ranks.launcher}'s variables")
    if ranks.init_method == "env://" and not 0 < number("MASTER_PORT") < 2**16:
        raise UserError(f"the environment's MASTER_PORT is {os.environ['MASTER_PORT']}, not from 1 to 65535")
    return ranks


def choose_port(job):
    """All processes of a job must come to the same port, two jobs on a machine to different ones."""
    os.environ.setdefault("MASTER_PORT", str(10000 + zlib.crc32(job.encode()) % 20000))


def number(variable, default=None):
    value = os.environ.get(variable, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UserError(f"the environment's {variable} is {value!r}, not a number") from None

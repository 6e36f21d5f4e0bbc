"""ddp_torchrun.py takes its place from whatever started it."""

import os
import shlex
import shutil
import socket

import pytest
from harness import PYTHON, forked, free_port, torchrun

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
OPTIONS = ("--epochs", "1", "--metrics", "metrics.jsonl")


def header(world_size, threads):
    return f"world size {world_size}, device cpu, backend gloo, threads per process {threads}"


@pytest.mark.slow
def test_plain_python_says_how_to_start_more(kit):
    """Under torchrun the processes share the threads."""
    result = kit.run(*forked("ddp_torchrun.py", *OPTIONS, "--lr", "0.1"))
    assert result.status == 0, result.err
    assert result.out.splitlines()[0] == header(1, CORES)
    (line,) = [line for line in result.out.splitlines() if line.startswith("to start a process per device: ")]
    command = shlex.split(line.partition(": ")[2])
    assert command == ["torchrun", "--nproc_per_node=2", "ddp_torchrun.py", *OPTIONS, "--lr", "0.1"]
    result = kit.run(*torchrun(2, *command[2:]))
    assert result.status == 0 and header(2, max(1, CORES // 2)) in result.out.splitlines(), result
    one, two = kit.metrics(event="end")
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)


@pytest.mark.slow
def test_threads_under_torchrun(kit):
    result = kit.run(*torchrun(2, "ddp_torchrun.py", *OPTIONS, "--threads", "3"))
    assert header(2, 3) in result.out.splitlines()


@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
def test_local_rank_as_an_argument(kit, spelling):
    """As torch.distributed.launch passes it, with and without the environment that goes before it."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    runs = [
        kit.start(*forked("ddp_torchrun.py", f"{spelling}={rank}", *OPTIONS), env=env | {"RANK": str(rank)} | more)
        for rank, more in [(0, {}), (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})]
    ]
    results = [run.result() for run in runs]
    assert [result.status for result in results] == [0, 0], results
    assert "world size 2" in results[0].out and results[1].out == ""


@pytest.mark.parametrize(
    "starter, scheme",
    [("by hand", "file"), pytest.param("by hand", "tcp", marks=pytest.mark.versions)]
    + [pytest.param("torchrun", scheme, marks=pytest.mark.slow) for scheme in ("tcp", "file")],
)
def test_init_method(kit, scheme, starter):
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{kit.path}/store"
    options = (*OPTIONS, "--init-method", method)
    if starter == "torchrun":
        result = kit.run(*torchrun(2, "ddp_torchrun.py", *options))
        assert result.status == 0, result.err
    else:
        runs = [
            kit.start(*forked("ddp_torchrun.py", *options), env={"RANK": str(rank), "WORLD_SIZE": "2"})
            for rank in range(2)
        ]
        assert [run.result().status for run in runs] == [0, 0]
    assert kit.metrics(event="end")[0]["world_size"] == 2


def test_port_in_use(kit):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        result = kit.run(*forked("ddp_torchrun.py"), env=env, timeout=30)
    assert result.status == 2
    assert len(result.errors) == 1
    assert f"rank 0 cannot listen on 127.0.0.1, port {port} (" in result.errors[0]
    assert "address already in use" in result.errors[0].lower()


PBS = """
def pbs(args):
    if "PBS_TASKNUM" not in os.environ:
        return None
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    choose_port(os.environ["PBS_JOBID"])
    rank, world_size = number("PBS_TASKNUM") - 1, number("PBS_NP")
    return Ranks(rank, world_size, rank, world_size, "PBS", args.init_method, cpus=1)


LAUNCHERS = [pbs, """


def test_another_launcher_takes_one_function(kit):
    kit.edit("common/launchers.py", "LAUNCHERS = [", PBS)
    env = {"PBS_NP": "2", "PBS_JOBID": f"{os.getpid()}.{kit.path}"}
    runs = [kit.start(*forked("ddp_torchrun.py", *OPTIONS), env=env | {"PBS_TASKNUM": f"{n}"}) for n in (1, 2)]
    results = [run.result() for run in runs]
    assert [result.status for result in results] == [0, 0], results
    assert header(2, 1) in results[0].out and results[1].out == ""
    result = kit.run(*forked("ddp_torchrun.py"), env=env | {"PBS_TASKNUM": "3"})
    assert result.errors == ["error: rank is 2 but must be from 0 to 1: see PBS's variables"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun (Open MPI) is not installed")
def test_mpirun(kit):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "--bind-to", "none"]
    short = {"TMPDIR": "/tmp"}  # Open MPI makes sockets there, whose paths must be short
    runs = [
        kit.start(*command, PYTHON, "ddp_torchrun.py", "--epochs", "1", "--metrics", f"{number}.jsonl", env=short)
        for number in range(2)
    ]
    for number, run in enumerate(runs):
        result = run.result()
        assert result.status == 0, result.err
        assert header(2, max(1, CORES // 2)) in result.out
        assert kit.metrics(f"{number}.jsonl", "end")[0]["world_size"] == 2
    mistake = kit.start(*command, PYTHON, "dp_train.py", env=short).result()
    assert mistake.status == 2
    assert mistake.errors == [
        "error: dp_train.py was started by mpirun: start it by `python dp_train.py`, or take ddp_torchrun.py"
    ]


@pytest.mark.slow
def test_srun(kit, slurm):
    result = kit.run("srun", "-N2", "--ntasks-per-node=2", PYTHON, "ddp_torchrun.py", *OPTIONS, env=slurm)
    assert result.status == 0, result.err
    assert header(4, max(1, CORES // 2)) in result.out
    one = ("-N1", "-n2", "--cpus-per-task=1")
    result = kit.run("srun", *one, PYTHON, "ddp_torchrun.py", *OPTIONS, env=slurm)
    assert result.status == 0, result.err
    assert header(2, 1) in result.out, "as many threads as --cpus-per-task allots"
    result = kit.run("srun", *one, PYTHON, "model_parallel_ddp.py", *OPTIONS, env=slurm)
    assert result.status == 0, result.err
    four, two, split = kit.metrics(event="end")
    assert (four["world_size"], two["world_size"], split["world_size"]) == (4, 2, 2)
    assert four["loss"] == pytest.approx(two["loss"], rel=1e-4) and two["weights_sha256"] == split["weights_sha256"]

    result = kit.run("srun", *one, PYTHON, "ddp_spawn.py", env=slurm)
    assert len(result.errors) == 1 and "ddp_spawn.py was started by srun" in result.errors[0]
    # A shell of one task is no launcher: scripts start there as anywhere.
    result = kit.run("srun", "-N1", "-n1", PYTHON, "ddp_spawn.py", *OPTIONS, env=slurm)
    assert result.status == 0 and header(2, max(1, CORES // 2)) in result.out
    batch = "#!/bin/sh\nexec " + shlex.join([PYTHON, "ddp_torchrun.py", *OPTIONS]) + "\n"
    (kit.path / "batch.sh").write_text(batch)
    result = kit.run("sbatch", "--wait", "-N2", "-n2", "-o", "batch.log", "batch.sh", env=slurm)
    log = (kit.path / "batch.log").read_text()
    assert result.status == 0 and header(1, CORES) in log, "without srun a batch script is one process"


@pytest.mark.parametrize(
    "places, lines",
    [
        (("0 2 0 2", "1 3 1 3"), ["WORLD_SIZE is 2 for {0} and 3 for {1}", "WORLD_SIZE is 3 for {1} and 2 for {0}"]),
        pytest.param(("0 3 0 3", "1 3 1 3", "1 3 1 3"), ["RANK is 1 for {1} and 1 for {1}"], marks=pytest.mark.slow),
        pytest.param(
            ("0 2 0 2", "1 2 0 2"),
            ["LOCAL_RANK is 0 for {0} and 0 for {1}", "LOCAL_RANK is 0 for {1} and 0 for {0}"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("0 2 0 2", "1 2 0 1"),
            ["LOCAL_WORLD_SIZE is 2 for {0} and 1 for {1}", "LOCAL_WORLD_SIZE is 1 for {1} and 2 for {0}"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["world size", "rank", "local rank", "local world size"],
)
def test_contradictions_by_hand(kit, places, lines):
    """Each process is right by itself, and all tell what is wrong, with both places; which comes first is open."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [dict(zip(names, place.split(), strict=True)) for place in places]
    ranks = [f"rank {rank} on {socket.gethostname()}" for rank in range(2)]
    results = [run.result(30) for run in [kit.start(*forked("ddp_torchrun.py"), env=env | place) for place in places]]
    assert {result.status for result in results} == {2}
    told = {line for result in results for line in result.errors}
    assert len(told) == 1 and told.pop().removeprefix("error: ").partition(":")[0] in [
        line.format(*ranks) for line in lines
    ], results

"""What terminals, shells and clusters do to a run: streams that are closed, signals, launchers by their variables."""

import os
import re
import shutil
import signal
import sys
import zipfile

import pytest
from harness import ANY_PORT, PYTHON, TORCHRUN, forked, free_port, torchrun

slow = pytest.mark.slow
ALONE = (PYTHON, "dp_train.py")
SPAWN = (PYTHON, "ddp_spawn.py")
EPOCH = ("--epochs", "1", "--metrics", "metrics.jsonl")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shells and signals of Unix")


@pytest.mark.parametrize(
    "command, stream",
    [
        (ALONE, ">/dev/full"),
        *(pytest.param(ALONE, one, marks=slow) for one in (">&-", "2>&-", "2>/dev/full")),
        *(pytest.param(SPAWN, one, marks=slow) for one in (">&- 2>&-", "| head -1")),
    ],
)
def test_stream_that_is_gone(kit, command, stream):
    """What cannot be printed is let go: the run goes on, and its snapshot is no one's standard output."""
    words = " ".join([*command, *EPOCH, "--snapshot", "run.pt", stream])
    result = kit.run("bash", "-o", "pipefail", "-c", words)
    assert result.status == 0, result
    assert [line["step"] for line in kit.metrics(event="end")] == [14]
    told = ["standard output: No space left on device; what is printed from here on is lost"]
    assert result.err.splitlines() == (told if stream == ">/dev/full" else []), result
    assert kit.run(*forked("dp_train.py"), *EPOCH, "--snapshot", "run.pt").status == 0, "the snapshot can be read"


def test_mistake_with_closed_streams(kit):
    result = kit.run("bash", "-c", " ".join([*ALONE, "--epochs", "none", ">&-", "2>&-"]))
    assert (result.status, result.out, result.err) == (2, "", "")


@pytest.mark.parametrize(
    "command",
    [forked("ddp_spawn.py"), pytest.param(torchrun(2, "ddp_torchrun.py"), marks=slow)],
    ids=["spawn", "torchrun"],
)
def test_closed_terminal(kit, command):
    """SIGHUP stops a run as SIGTERM does. torchrun then fails with 1, and once aborted while its interpreter ended."""
    run = kit.start(*command, "--epochs", "100000", "--snapshot", "run.pt", "--metrics", "metrics.jsonl")
    run.wait_for(lambda: bool(kit.metrics(event="step")))
    os.kill(run.pid, signal.SIGHUP)
    result = run.result(30)
    assert result.status in ([1, -signal.SIGABRT] if command[0] == PYTHON else [129]), result
    assert not result.processes and not result.files, result
    assert "stopped by SIGHUP after step" in result.out and (kit.path / "run.pt").exists()


@slow
def test_nohup(kit):
    run = kit.start("nohup", *SPAWN, "--epochs", "200", "--snapshot", "run.pt", "--metrics", "metrics.jsonl")
    run.wait_for(lambda: bool(kit.metrics(event="step")))
    os.killpg(run.pid, signal.SIGHUP)
    assert run.result().status == 0 and len(kit.metrics(event="end")) == 1


def test_lines_of_several_ranks_stay_whole(kit):
    line = "        return self.net2(self.relu(self.net1(pixels)))\n"
    kit.edit("common/job.py", line, f"        say()\n{line}")
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write("\n\ndef say():\n    print('a', *range(30), 'z')\n")
    result = kit.run(*forked("ddp_spawn.py"), "--nprocs", "2", "--epochs", "20")
    lines = [line for line in result.out.splitlines() if re.search("[az] ?[0-9]|[0-9] ?[az]", line)]
    lines = [line for line in lines if not line.startswith(("world", "epoch", "done"))]
    assert len(lines) > 700 and set(lines) == {"a " + " ".join(map(str, range(30))) + " z"}


@pytest.mark.parametrize("size", ["0", "-1"])
def test_world_of_nobody(kit, size):
    env = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    result = kit.run(*forked("ddp_torchrun.py"), env=env)
    assert result.errors == [f"error: world size is {size} but must be at least 1: see torchrun's variables"]


def test_snapshot_that_is_a_foreign_zip_file(kit):
    with zipfile.ZipFile(kit.path / "run.pt", "w") as file:
        file.writestr("readme", "of somebody else")
    result = kit.run(*forked("dp_train.py"), "--snapshot", "run.pt")
    assert result.status == 2
    assert "--snapshot run.pt is no whole snapshot of this kit (" in result.err and len(result.errors) == 1, result


def test_snapshot_path_that_is_not_utf_8(kit):
    run = kit.start(*forked("dp_train.py"), "--snapshot", os.fsdecode(b"run\xff.pt"), *EPOCH)
    result = run.result()
    assert result.status == 2 and "argument --snapshot: invalid utf_8_path value" in result.errors[0], result
    assert not list(kit.path.glob("run*"))


@slow
def test_score_that_is_no_number(kit):
    kit.edit("common/job.py", '"loss": losses}', '"loss": losses, "ratio": losses / 0 * 0}')
    result = kit.run(*SPAWN, *EPOCH)
    assert result.status == 0 and "test ratio nan" in result.out
    assert kit.metrics(event="eval")[0]["ratio"] == "nan"


@slow
def test_pytorch_job_of_kubernetes(kit):
    """Two pods by torchrun's PET_ variables, as a PyTorchJob sets them."""
    port = str(free_port())
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    pods = [kit.start(*TORCHRUN, "ddp_torchrun.py", *EPOCH, env=env | {"PET_NODE_RANK": f"{n}"}) for n in (0, 1)]
    assert [pod.result().status for pod in pods] == [0, 0]
    assert [line["world_size"] for line in kit.metrics(event="end")] == [2]


@slow
@pytest.mark.parametrize(
    "words",
    [
        ["--standalone", "--nproc-per-node=2", "ddp_torchrun.py"],
        ["--nproc-per-node=cpu", "ddp_torchrun.py"],
        ["--nproc-per-node=2", "-m", "ddp_torchrun"],
    ],
    ids=lambda words: words[0] if len(words) < 3 else words[-2],
)
def test_ways_to_call_torchrun(kit, words):
    """Two at once, without any port given."""
    words = [*ANY_PORT, *words, "--epochs", "1"]
    runs = [
        kit.start(*TORCHRUN, *words, "--metrics", f"{number}.jsonl", env={"PYTHONPATH": "."}) for number in range(2)
    ]
    assert [run.result().status for run in runs] == [0, 0]
    size = os.cpu_count() if "--nproc-per-node=cpu" in words else 2
    assert [kit.metrics(f"{number}.jsonl", "end")[0]["world_size"] for number in range(2)] == [size, size]


@slow
def test_torchrun_under_srun(kit, slurm):
    command = [shutil.which("torchrun", path=slurm["PATH"]) or "torchrun", "--standalone", "--nproc-per-node=2"]
    result = kit.run("srun", "-N1", "-n1", *command, "ddp_torchrun.py", *EPOCH, env=slurm)
    assert result.status == 0, result
    assert [line["world_size"] for line in kit.metrics(event="end")] == [2]

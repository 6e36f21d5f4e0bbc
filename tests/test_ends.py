"""However a run ends: no process, port or file is left, and the status says how it was."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import forked, forked_ranks, free_port, torchrun

SPAWN = ("python", "ddp_spawn.py")
LONG = ("--epochs", "100000", "--metrics", "metrics.jsonl")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def training(kit):
    return lambda: bool(kit.metrics(event="step"))


@pytest.mark.parametrize(
    "command", [forked("ddp_spawn.py"), forked_ranks(2, "ddp_torchrun.py")], ids=["spawn", "ranks"]
)
def test_ranks_that_differ(kit, command):
    kit.fault("model.net2.bias.data += 1e-6")
    result = kit.run(*command, "--epochs", "1")
    assert result.status == 1
    assert result.errors == ["error: the weights of rank 1 differ from those of rank 0, first in net2.bias"]


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
    ids=["SIGTERM", "SIGINT"],
)
@pytest.mark.parametrize("shell", ["foreground", pytest.param("background", marks=pytest.mark.slow)])
def test_signal_to_the_parent(kit, number, status, shell):
    workers = 1 if shell == "foreground" else 0
    command = (*(forked("ddp_spawn.py") if workers else SPAWN), *LONG, "--workers", workers)
    if shell == "background":
        # A shell without job control lets what it starts with & ignore SIGINT.
        command = ("sh", "-c", '"$@" & echo $! > pid; wait $!', "sh", *[sys.executable, *map(str, command[1:])])
    run = kit.start(*command)
    run.wait_for(training(kit))
    assert len(kit.processes()) >= 3 + 2 * workers, "parent, two ranks, their loader workers"
    pid = int((kit.path / "pid").read_text()) if shell == "background" else run.pid
    start = time.monotonic()
    os.kill(pid, number)
    result = run.result(timeout=30)
    assert time.monotonic() - start < 15
    assert result.status == status and not result.processes and not result.files, result
    # A worker that is interrupted while it hands a batch over may say so itself.
    assert workers or result.err == ""


@pytest.mark.parametrize(
    "script, module",
    [
        ("dp_train.py", "torch"),
        ("ddp_spawn.py", "common.run"),
        pytest.param("ddp_torchrun.py", "torch", marks=pytest.mark.slow),
        pytest.param("model_parallel_ddp.py", "common.run", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_a_module_is_imported(kit, script, module):
    """Python would show the stack of an import."""
    hook = f"def find_spec(self, name, *more):\n        if name == '{module}': os.kill(os.getpid(), signal.SIGINT)"
    kit.first(f"import os, signal, sys\nclass Hook:\n    {hook}\nsys.meta_path.insert(0, Hook())")
    result = kit.run("python", "first.py", script)
    assert (result.status, result.out, result.err) == (-signal.SIGINT, "", "")


@linux
@pytest.mark.slow
def test_ctrl_c_while_the_ranks_import_torch(kit):
    """It waits until they can handle it, and they end without a word."""
    run = kit.start(*SPAWN, *LONG)
    run.wait_for(lambda: sum("spawn_main" in line for _, line in kit.processes()) == 2)
    os.killpg(run.pid, signal.SIGINT)
    result = run.result(timeout=30)
    assert (result.status, result.err, result.processes, result.files) == (130, "", [], []), result


@pytest.mark.parametrize("script", ["dp_train.py", "ddp_torchrun.py"])
def test_ctrl_c_without_a_parent(kit, script):
    run = kit.start(*forked(script, *LONG))
    run.wait_for(training(kit))
    os.kill(run.pid, signal.SIGINT)
    result = run.result(timeout=30)
    assert (result.status, result.err, result.processes) == (130, "", [])


@linux
@pytest.mark.parametrize("script", ["dp_train.py", "ddp_spawn.py"])
def test_signal_while_a_loader_worker_is_forked(kit, script):
    """Python drops what a handler raises in the midst of that."""
    hook = "lambda: os.kill(os.getpid(), signal.SIGINT)"
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(f"\n\nimport os, signal\n\nos.register_at_fork(after_in_parent={hook})\n")
    result = kit.run(*forked(script, "--workers", "1", "--epochs", "1"), timeout=60)
    # Of the ranks of mp.spawn none was asked to stop: they were all interrupted by themselves.
    assert result.status == 130 and "Exception ignored" not in result.err and not result.processes, result


@linux
@pytest.mark.parametrize(
    "command, number",
    [
        (forked("ddp_spawn.py"), signal.SIGKILL),
        pytest.param(torchrun(2, "ddp_torchrun.py"), signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(SPAWN, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(torchrun(2, "ddp_torchrun.py"), signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_nobody_outlives_a_dead_parent(kit, command, number):
    run = kit.start(*command, *LONG, "--workers", "1")
    run.wait_for(training(kit))
    os.kill(run.pid, number)
    result = run.result(timeout=45)
    assert result.status != 0 and not result.processes
    assert all(name.startswith("pymp-") for name in result.files), "but Python's, of loader workers"


@linux
@pytest.mark.parametrize("command", [forked_ranks(2, "ddp_torchrun.py"), forked("ddp_spawn.py")])
def test_threads_of_gloo_end_before_the_interpreter(kit, command):
    """One that lets go of a tensor while the interpreter ends would abort the process, now and then."""
    let_go = "            process.let_go(finished=not status)\n"
    threads = "[comm.read_text() for comm in __import__('pathlib').Path('/proc/self/task').glob('*/comm')]"
    tell = f"            print('at the end', {threads})\n"
    kit.edit("common/errors.py", let_go, let_go + tell)
    result = kit.run(*command, "--epochs", "1", "--snapshot", "run.pt")
    assert result.status == 0 and "at the end [" in result.out and "gloo_" not in result.out, result


@pytest.mark.parametrize("command", [forked("dp_train.py"), pytest.param(SPAWN, marks=pytest.mark.slow)])
def test_the_collector_is_off_for_the_imports_alone(kit, command):
    kit.edit(
        "common/job.py", "def load_data():\n", "def load_data():\n    print('on:', __import__('gc').isenabled())\n"
    )
    result = kit.run(*command, "--steps", "1")
    assert result.status == 0 and "on: True\n" in result.out and "on: False" not in result.out, result


@pytest.mark.versions
def test_collective_that_nobody_waited_for(kit):
    """At the end its thread lets go of the tensor, for which it needs Python's lock while it is waited for."""
    left = "    dist.destroy_process_group()\n"
    kit.edit("common/group.py", left, f"    dist.all_reduce(torch.ones(2**24), async_op=True)\n{left}")
    assert kit.run(*forked_ranks(2, "ddp_torchrun.py"), "--epochs", "1", timeout=60).status == 0


def listening(pids):
    """Local addresses, as /proc writes them, on which these processes listen."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


# The machine's name leads to an address that others can reach, as on most machines; here it may be loopback's, to which
# gloo would keep by itself.
EXPOSED = """import ctypes, subprocess
assert not ctypes.CDLL(None).unshare(0x4020000)  # a host name and mounts of its own
commands = "mount --make-rprivate /; hostname exposed; mount --bind hosts /etc/hosts"
subprocess.run(["sh", "-ec", commands], check=True)"""


@linux
@pytest.mark.parametrize(
    "starter", ["spawn", "pairs", "alone", "by hand", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_nothing_listens_to_other_machines(kit, starter):
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    if os.geteuid() != 0 or not addresses or not shutil.which("mount"):
        pytest.skip("needs root, mount and an address other than loopback")
    (kit.path / "hosts").write_text(f"127.0.0.1 localhost\n{addresses[0]} exposed\n")
    kit.first(EXPOSED)
    if starter == "by hand":  # rank 0 serves the store
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        command = forked("first.py", "ddp_torchrun.py", *LONG)
        runs = [kit.start(*command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    elif starter == "torchrun":
        kit.first(EXPOSED + "\nimport os, sys\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
        runs = [kit.start("python", "first.py", *torchrun(2, "ddp_torchrun.py", *LONG)[1:])]
    else:
        script = {"spawn": "ddp_spawn.py", "pairs": "model_parallel_ddp.py", "alone": "ddp_torchrun.py"}[starter]
        runs = [kit.start(*forked("first.py", script, *LONG))]
    runs[0].wait_for(training(kit))
    # torchrun itself serves its store on all addresses, which the scripts cannot change.
    pids = [pid for pid, line in kit.processes() if "torch.distributed.run" not in line]
    addresses = listening(pids)
    assert addresses, "gloo listens somewhere"
    assert set(addresses) <= LOOPBACK, addresses
    kit.kill_all()

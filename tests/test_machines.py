"""Several machines: ddp_multinode.sh and bare launchers, on network namespaces."""

import contextlib
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import network
import pytest
import torch
from harness import PYTHON, TORCHRUN, forked, forked_ranks, free_port

SCRIPT = "./ddp_multinode.sh"
ENV = {"PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"}  # of torchrun


@pytest.fixture
def machines(tmp_path):
    if reason := network.missing():
        pytest.skip(reason)
    made = []

    def make(count):
        made.append(network.Network(count, tmp_path))
        return made[0]

    yield make
    for one in made:
        one.remove()


def start_all(kit, net, *command):
    """Start a command on each machine; @ in it stands for the machine's number."""
    commands = [[str(word).replace("@", str(number)) for word in command] for number in range(len(net.names))]
    return [kit.start(*net.on(number, *words), env=ENV) for number, words in enumerate(commands)]


def kill_machine(kit, number):
    """Kill all that runs on a machine, which were started with MACHINE in their environment."""
    for pid, _ in kit.processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone meanwhile, with its parent
            if f"MACHINE={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


def told(result):
    """What stands in the error output but for waiting: of torchrun's summary nothing may be left."""
    return [line for line in result.err.splitlines() if not line.startswith("waiting for ")]


def weights(kit, name):
    return torch.load(kit.path / name, weights_only=True)["model"]


CLASSICAL = ("--nnodes=2", "--node_rank=@", "--master_addr=h0", "--master_port=29500")
STARTERS = {
    "script, name": (3, SCRIPT, "--nnodes=3", "--node-rank=@", "--master-addr=h0", "--", "model_parallel_ddp.py"),
    "script, elastic": (2, SCRIPT, "--elastic=2:2", "--master-addr=10.0.0.1", "--", "ddp_torchrun.py"),
    "torchrun, name": (2, *TORCHRUN, *CLASSICAL, "ddp_torchrun.py"),
    "by hand, name": (
        *(2, "env", "RANK=@", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=h0"),
        *("MASTER_PORT=29500", PYTHON, "ddp_torchrun.py"),
    ),
    "launch, name": (2, PYTHON, "-m", "torch.distributed.launch", *CLASSICAL, "ddp_torchrun.py"),
}


@pytest.mark.slow
@pytest.mark.parametrize("starter", STARTERS)
def test_agreement(kit, machines, starter):
    """The machines' own names lead to loopback, and still they reach each other and the weights of one process."""
    count, *command = STARTERS[starter]
    options = ("--epochs", "2", "--precision", "fp64", "--metrics", "metrics.jsonl")
    alone = kit.run(*forked("ddp_torchrun.py", *options, "--snapshot", "alone.pt"))
    assert alone.status == 0, alone.err
    runs = start_all(kit, machines(count), *command, *options, "--snapshot", "all.pt")
    results = [run.result() for run in runs]
    assert [result.status for result in results] == [0] * count, results
    assert f"world size {count}," in results[0].out
    one, several = weights(kit, "alone.pt"), weights(kit, "all.pt")
    assert max((one[name] - several[name]).abs().max().item() for name in one) < 1e-9
    assert kit.metrics(event="end")[1]["world_size"] == count


@pytest.mark.parametrize(
    "first, second, words",
    [
        pytest.param(
            *("0 10.0.0.1", "0 10.0.0.1", "--node-rank 0 on h1, but --master-addr 10.0.0.1 is not its address"),
            marks=pytest.mark.slow,
        ),
        ("1 10.0.0.1", "0 10.0.0.1", "--node-rank 1 on h0, but --master-addr 10.0.0.1 is its address"),
        pytest.param("0 nowhere", "1 nowhere", "--master-addr nowhere: ", marks=pytest.mark.slow),
        pytest.param("0 10.0.0.1", "2 10.0.0.1", "--node-rank 2 must be from 0 to 1:", marks=pytest.mark.slow),
    ],
)
def test_wrong_place(kit, machines, first, second, words):
    net = machines(2)
    runs = []
    for number, place in enumerate((first, second)):
        rank, address = place.split()
        options = ("--nnodes=2", f"--node-rank={rank}", f"--master-addr={address}", "--nproc-per-node=1", "--timeout=4")
        runs.append(kit.start(*net.on(number, SCRIPT, *options), env=ENV))
    results = [run.result(20) for run in runs]
    assert any(words in line for result in results if result.status == 2 for line in result.errors), results
    assert {result.status for result in results} <= {1, 2}  # one may wait in vain
    assert all(len(result.errors) == 1 for result in results)


def test_machine_that_does_not_come(kit, machines):
    net = machines(3)
    options = ("--nnodes=3", "--master-addr=h0", "--nproc-per-node=1", "--timeout=6")
    late = kit.start(*net.on(1, SCRIPT, *options, "--node-rank=1"), env=ENV)
    host = kit.start(*net.on(0, SCRIPT, *options, "--node-rank=0"), env=ENV)
    late, host = late.result(20), host.result(20)
    assert (late.status, host.status) == (1, 1)
    missing = "node 2; here is node 0 (h0); node 1 (h1)"
    assert host.errors == late.errors == [f"error: waited 6 s in vain for {missing}"]
    assert f"waiting for {missing} (" in late.err


@pytest.mark.slow
def test_same_node_rank_twice(kit, machines):
    net = machines(3)
    options = ("--nnodes=3", "--master-addr=h0", "--nproc-per-node=1", "--timeout=5")
    host = kit.start(*net.on(0, SCRIPT, *options, "--node-rank=0"), env=ENV)
    twice = [kit.start(*net.on(number, SCRIPT, *options, "--node-rank=1"), env=ENV) for number in (1, 2)]
    lines = [line for run in twice for line in run.result(20).errors]
    line = "error: --node-rank is 1 for rank 1 on h{} and 1 for rank 1 on h{}: give each its own"
    assert len(lines) == 2 and set(lines) <= {line.format(1, 2), line.format(2, 1)}
    host = host.result(20)
    assert host.status == 2 and host.errors == lines[:1]


@pytest.mark.versions
def test_master_port_taken(kit):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--nnodes=2", "--node-rank=0", f"--master-addr={socket.gethostname()}", f"--master-port={port}")
        result = kit.run(SCRIPT, *options, "--nproc-per-node=1", env=ENV, timeout=20)
    assert result.status == 2
    assert len(result.errors) == 1 and f", port {port} (" in result.errors[0]
    assert "address already in use" in result.errors[0].lower()


@pytest.mark.slow
def test_strangers_at_the_port(kit):
    """Neither one that connects and sends a part of a message, nor one that listens and is silent, holds a machine."""
    options = ("--nnodes=2", f"--master-addr={socket.gethostname()}", "--timeout=6", "--nproc-per-node=1")
    port = free_port()
    host = kit.start(SCRIPT, *options, f"--master-port={port}", "--node-rank=0", env=ENV)
    strangers = []
    while host.process.poll() is None:
        with contextlib.suppress(OSError):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall((b"\0", b"GET / HTTP/1.1", bytes(1000))[len(strangers) % 3])
        time.sleep(0.1)
    (line,) = host.result().errors
    assert strangers and line.startswith("error: waited 6 s in vain for node 1; here is node 0 (")
    with socket.create_server(("127.0.0.1", port)):
        other = ("--nnodes=2", "--master-addr=127.0.0.1", "--simulated", f"--master-port={port}", "--node-rank=1")
        result = kit.run(SCRIPT, *other, "--timeout=6", env=ENV, timeout=40)
    assert result.status == 1 and told(result) == [
        f"error: what listens on 127.0.0.1, port {port} does not answer as a store does: is the port right?"
    ]


@pytest.mark.parametrize(
    "options, words",
    [
        ([], "--nnodes is missing"),
        (["--nnodes=2", "--node-rank=0"], "--master-addr is missing"),
        (["--nnodes=two"], "argument --nnodes: invalid number value: 'two'"),
        (["--nnodes=0"], "argument --nnodes: 0 is not from 1 to 65535"),
        (["--elastic=2"], "argument --elastic: 2 is not MIN:MAX"),
        (["--elastic=3:2"], "--elastic: 3:2 is not MIN:MAX, such as 1:2, with MIN from 1 to MAX"),
        (["--epochs=5"], "unrecognized arguments: --epochs=5; what belongs to the script comes after --"),
        (["--nnodes"], "argument --nnodes: expected one argument"),
        (
            ["--elastic=1:3", "--master-addr=localhost", "--nproc-per-node=2", "--", "--batch-size=64"],
            "--batch-size 64 does not divide into 6 processes: --elastic allows these",
        ),
        (["--nnodes=2", "--", "no.py"], "there is no script no.py"),
        (
            ["--nnodes=2", "--node-rank=1", "--master-addr=localhost"],
            f"--master-addr localhost leads {socket.gethostname()} to itself",
        ),
    ],
)
def test_wrong_options(kit, options, words):
    result = kit.run(SCRIPT, *options, env=ENV, timeout=20)
    assert result.status == 2 and len(result.errors) == 1 and words in result.errors[0], result


@pytest.mark.slow
def test_machines_that_differ(kit, machines):
    start = (SCRIPT, "--nnodes=2", "--node-rank=@", "--master-addr=h0", "--", "ddp_torchrun.py", "--timeout", "30")
    for result in [run.result() for run in start_all(kit, machines(2), *start, "--seed", "@")]:
        assert result.status == 2
        (line,) = told(result)
        assert line.startswith("error: machines differ in --seed: 0 at node 0 (h0), 1 at node 1 (h1)")


@pytest.mark.slow
def test_mistake_with_elastic(kit, machines):
    """It is not tried again."""
    start = (SCRIPT, "--elastic=1:2", "--master-addr=10.0.0.1", "--", "ddp_torchrun.py", "--seed", "@")
    for result in [run.result() for run in start_all(kit, machines(2), *start)]:
        assert result.status == 2
        (line,) = told(result)
        assert line.startswith("error: machines differ in --seed: ")


@pytest.mark.slow
@pytest.mark.parametrize("which, mask, size", [("train", "~in_test", 1438), ("test", "in_test", 359)])
def test_data_that_differ(kit, machines, which, mask, size):
    """The same code reads a shorter file on one machine."""
    shorter = f"part[{mask}][: {size} - int(__import__('os').environ['GROUP_RANK'])]"
    kit.edit(
        "common/job.py",
        f"TensorDataset(pixels[{mask}], labels[{mask}])",
        f"TensorDataset(*({shorter} for part in (pixels, labels)))",
    )
    start = (SCRIPT, "--nnodes=2", "--node-rank=@", "--master-addr=h0", "--", "ddp_torchrun.py", "--timeout", "30")
    line = f"error: the size of the {which} set is {size} at node 0 (h0), {size - 1} at node 1 (h1): "
    for result in [run.result() for run in start_all(kit, machines(2), *start)]:
        assert result.status == 2
        assert told(result) == [f"{line}it must be the same everywhere"]


def test_simulated_machines(kit):
    """They end with the weights that as many processes of one machine end with."""
    options = ("--epochs", "2", "--metrics", "m")
    result = kit.run(SCRIPT, "--simulate", "2", "--", "ddp_torchrun.py", *options, env=ENV)
    assert result.status == 0 and "[node 0] world size 2, device cpu, backend gloo" in result.out, result
    assert kit.run(*forked_ranks(2, "ddp_torchrun.py", *options)).status == 0
    simulated, ranks = kit.metrics("m", "end")
    assert simulated["weights_sha256"] == ranks["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_simulated_machines_end_together(kit, number, status):
    """Also where a shell lets it ignore SIGINT, as for what it starts in the background."""
    ignoring = f"trap '' INT; exec {SCRIPT} --simulate 2 -- ddp_torchrun.py --epochs 100000 --metrics m"
    run = kit.start("bash", "-c", ignoring, env=ENV)
    run.wait_for(lambda: kit.metrics("m", "step"))
    os.kill(run.pid, number)
    start = time.monotonic()
    result = run.result(60)
    assert result.status == status and not result.processes
    assert time.monotonic() - start < 30
    assert "[node 0] world size 2, device cpu, backend gloo" in result.out


@pytest.mark.slow
@pytest.mark.parametrize("start", ["--nnodes=2 --node-rank=@ --master-addr=h0", "--elastic=1:2 --master-addr=10.0.0.1"])
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_clean_stop(kit, machines, start, number, status):
    """A signal on one machine lets the ranks of all save and leave: no machine takes that for a failure."""
    options = ("ddp_torchrun.py", "--epochs", "100000", "--metrics", "m", "--snapshot", "s.pt")
    runs = start_all(kit, machines(2), SCRIPT, *start.split(), "--", *options)
    runs[0].wait_for(lambda: kit.metrics("m", "step"))
    os.kill(runs[1].pid, number)
    results = [run.result(60) for run in runs]
    assert [result.status for result in results] == [143, status], results
    assert [told(result) for result in results] == [[], []]
    assert [result.out.count("stopped by SIGTERM") for result in results] == [1, 1], results
    assert (kit.path / "s.pt").exists()


@pytest.mark.slow
def test_frozen_machine(kit, machines):
    """The only rank of a machine is stopped: the other machine tells it and ends, and so do script and rank there."""
    kit.fault("os.kill(os.getpid(), signal.SIGSTOP)", rank=0)
    start = (SCRIPT, "--nnodes=2", "--node-rank=@", "--master-addr=h0", "--", "ddp_torchrun.py", "--timeout", "5")
    frozen, other = [run.result(120) for run in start_all(kit, machines(2), *start)]
    assert (other.status, frozen.status) == (1, 1)
    assert not other.processes and not frozen.processes
    assert other.errors and frozen.errors == [
        "error: another machine has failed, and rank 0 on h0 did not end: it was killed"
    ]


@pytest.mark.slow
def test_killed_rank(kit, machines):
    """No rank is left on its machine to tell it."""
    kit.fault("os.kill(os.getpid(), signal.SIGKILL)")
    start = (SCRIPT, "--nnodes=2", "--node-rank=@", "--master-addr=h0", "--", "ddp_torchrun.py")
    other, killed = [run.result() for run in start_all(kit, machines(2), *start)]
    assert (other.status, killed.status) == (1, 137)
    assert told(killed) == ["error: rank 1 on h1 was killed by SIGKILL"]
    (line,) = told(other)
    assert line.startswith("error: rank 1 on h1 does not answer in step 5/14")


@pytest.mark.slow
def test_sbatch(kit, slurm):
    """On two nodes; preempted, it saves, is requeued, and ends as if it had not been."""
    env = slurm | {"PATH": f"{ENV['PATH']}:/usr/sbin"}
    job = ("--", "ddp_torchrun.py", "--epochs", "3", "--metrics", "m", "--snapshot")
    kit.edit(
        "ddp_torchrun.py",
        "            run.record(loss)\n",
        "            __import__('time').sleep(0.05)\n            run.record(loss)\n",
    )
    twice = kit.run("sbatch", "--wait", "-N2", "--ntasks-per-node=2", "-o", "twice.log", SCRIPT, env=env)
    assert twice.status == 2
    assert "error: SLURM has 4 tasks for 2 nodes" in (kit.path / "twice.log").read_text()

    whole = kit.run("sbatch", "--wait", "-N2", "-o", "whole.log", SCRIPT, *job, "whole.pt", env=env)
    assert whole.status == 0, (kit.path / "whole.log").read_text()
    for number, how in enumerate((["--signal=TERM"], ["--batch", "--signal=TERM"], ["--full", "--signal=TERM"])):
        log, before = kit.path / f"log.{number}", len(kit.metrics("m"))
        command = ("sbatch", "--parsable", "-N2", "-o", log.name, SCRIPT, *job, f"{number}.pt")
        identity = kit.start(*command, env=env).result().out.strip()
        end = time.monotonic() + 200
        while len(kit.metrics("m")) < before + 5:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        assert kit.start("scancel", *how, identity, env=env).result().status == 0
        while len(kit.metrics("m", "end")) < number + 2:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        for words in ("stopped by SIGTERM", "requeued: goes on from the snapshot", f"goes on from {number}.pt"):
            assert words in log.read_text(), (how, log.read_text())
    ends = kit.metrics("m", "end")
    assert len({line["weights_sha256"] for line in ends}) == 1 and {line["world_size"] for line in ends} == {2}


@pytest.mark.slow
def test_sbatch_array_from_a_path_with_a_space(kit, slurm):
    env = slurm | {"PATH": f"{ENV['PATH']}:/usr/sbin"}
    shutil.copytree(kit.path, kit.path / "a kit")
    shutil.rmtree(kit.path / "common")
    array = ("sbatch", "--wait", "-N1", "--array=0-1", "-o", "log.%a", f"a kit/{SCRIPT}")
    result = kit.run(*array, "--", "ddp_torchrun.py", "--steps", "2", env=env)
    logs = [(kit.path / f"log.{task}").read_text() for task in (0, 1)]
    assert result.status == 0 and all("done: 1 epochs, 2 steps" in log for log in logs), logs


@pytest.mark.slow
@pytest.mark.parametrize(
    "interface, status, line",
    [
        (
            "lo",
            1,
            "error: h0 does not reach h1 at 127.0.0.1, port … from its interface lo (Connection refused): all ports",
        ),
        (
            "^docker0",
            1,
            "error: GLOO_SOCKET_IFNAME has '^docker0' on h0, whose interfaces are lo, e0: name one",
        ),
    ],
)
def test_wrong_interface(kit, machines, interface, status, line):
    start = ("env", f"GLOO_SOCKET_IFNAME={interface}", SCRIPT, "--nnodes=2", "--node-rank=@", "--master-addr=h0")
    for result in [run.result() for run in start_all(kit, machines(2), *start)]:
        assert result.status == status
        assert [re.sub(r"port \d+,", "port …", found)[: len(line)] for found in result.errors] == [line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dies, words", [(1, "error: rank 1 on h1 does not answer in step"), (0, "error: rank 0 on h0, ")]
)
def test_machine_that_dies(kit, machines, dies, words):
    """The other one tells it in one line; also where the store goes with the machine, without torch's stacks."""
    net, options = machines(2), ("--master-addr=h0", "--", "ddp_torchrun.py", "--epochs", "100000", "--metrics", "m")
    runs = [
        kit.start(
            *net.on(rank, SCRIPT, "--nnodes=2", f"--node-rank={rank}", *options), env=ENV | {"MACHINE": f"{rank}"}
        )
        for rank in (0, 1)
    ]
    runs[0].wait_for(lambda: kit.metrics("m", "step"), timeout=90)
    kill_machine(kit, dies)
    other = runs[1 - dies].result(60)
    (line,) = told(other)
    assert other.status == 1 and line.startswith(words)
    runs[dies].result(10)


@pytest.mark.slow
def test_mistake_is_not_tried_again(kit):
    command = (*TORCHRUN, "--nproc_per_node=2", "--max-restarts=5", "ddp_torchrun.py", "--batch-size", "3")
    result = kit.run(*command, timeout=60)
    assert result.status == 1 and len(result.errors) == 1, result.err
    assert result.errors[0].startswith("error: --batch-size 3 does not divide into 2 processes")


CHECK = (SCRIPT, "--nnodes=2", "--node-rank=@", "--master-addr=h0", "--nproc-per-node=2", "--timeout=12", "--check")


@pytest.mark.slow
def test_check(kit, machines):
    first, second = [run.result() for run in start_all(kit, machines(2), *CHECK)]
    assert (first.status, second.status) == (0, 0), first.err
    rows = [line.split() for line in first.out.splitlines() if line[:1].isdigit()]
    assert [row[:7] for row in rows] == [
        [
            f"{rank}",
            "node",
            f"{rank // 2}",
            f"(h{rank // 2})",
            f"{rank % 2}",
            f"10.0.0.{rank // 2 + 1}",
            f"e{rank // 2}",
        ]
        for rank in range(4)
    ]
    assert all(row[7:] == ["cpu", torch.__version__, "gloo"] for row in rows)
    assert first.out.count("MB/s per rank") == 5
    assert first.out.rstrip().endswith("all is well: the sums are right on all ranks")


@pytest.mark.slow
def test_check_finds_an_mtu_hole(kit, machines):
    """Jumbo frames are on, and the switch drops them on the way to h1."""
    net = machines(2)
    net.jumbo_frames()
    start = time.monotonic()
    for result in [run.result(60) for run in start_all(kit, net, *CHECK)]:
        assert result.status == 1
        (line,) = told(result)
        assert line.startswith("error: 1,000 bytes at once from h0 do, 4,000 do not reach h1 at 10.0.0.2, port ")
        assert "interface e0 (timed out): something drops large packets; let all interfaces have its MTU: `ip" in line
    assert time.monotonic() - start < 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "place, code, seconds",
    [
        ("    device = group.join", "os.kill(os.getpid(), 19)", 12),
        ("            test(size, device)", "os._exit(0)", 17),
    ],
    ids=["does not join", "gone"],
)
def test_check_names_a_rank_that_is_missing(kit, machines, place, code, seconds):
    indent = place[: -len(place.lstrip())]
    kit.edit("common/check.py", place, f"{indent}if here.rank == 3:\n{indent}    {code}\n{place}")
    start = time.monotonic()
    runs = start_all(kit, machines(2), *CHECK)
    first = runs[0].result(60)
    assert time.monotonic() - start < 45
    assert first.status == 1
    (line,) = first.errors
    missing = "node 1 (h1) local rank 1; here is node 0 (h0); node 1 (h1) local rank 0"
    assert re.sub(r"\d+ s", "… s", line) == f"error: waited … s in vain for {missing}"
    assert int(re.search(r"(\d+) s", line)[1]) < seconds + 3
    kit.kill_all()  # torchrun gives a stopped process 30 s to end


@pytest.mark.slow
def test_torch_that_differs(kit, machines):
    (kit.path / "sitecustomize.py").write_text(
        "import os\nif os.path.exists('/etc/hosts') and '127.0.1.1 h1' in open('/etc/hosts').read():\n"
        "    import torch\n    torch.__version__ = '99.0.0'\n"
    )
    command = ("env", "PYTHONPATH=.", SCRIPT, *CLASSICAL[:1], "--node-rank=@", "--master-addr=h0")
    for result in [run.result() for run in start_all(kit, machines(2), *command)]:
        (line,) = result.errors
        assert line.startswith(
            f"error: machines differ in torch: {torch.__version__} at node 0 (h0), 99.0.0 at node 1 (h1)"
        )


@pytest.mark.slow
def test_files_that_differ(kit, machines):
    """One machine has an older copy of a file."""
    (kit.path / "old.py").write_text((kit.path / "common" / "job.py").read_text() + "\n")
    old = 'test "$(hostname)" = h0 || mount --bind old.py common/job.py; exec $*'
    command = ("sh", "-euc", old, "sh", SCRIPT, "--nnodes=2", "--node-rank=@", "--master-addr=h0")
    for result in [run.result() for run in start_all(kit, machines(2), *command)]:
        (line,) = result.errors
        assert line.startswith("error: machines differ in common/job.py: ")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "link cut"])
def test_elastic(kit, machines, fault):
    """A machine goes and comes back; the other goes on alone meanwhile, and the weights are those of one process."""
    kit.edit(
        "ddp_torchrun.py",
        "            run.record(loss)\n",
        "            __import__('time').sleep(0.1 * __import__('os').path.exists('slow'))\n"
        "            run.record(loss)\n",
    )
    options = ("--epochs", "60", "--precision", "fp64", "--save-every", "10", "--timeout", "10", "--snapshot")
    assert kit.run(*forked("ddp_torchrun.py", *options, "alone.pt")).status == 0
    (kit.path / "slow").touch()
    net, logs = machines(2), [kit.path / "log.0", kit.path / "log.1"]

    def start(number):
        command = (SCRIPT, "--elastic=1:2", "--master-addr=10.0.0.1", "--", "ddp_torchrun.py", *options)
        with logs[number].open("a") as log:
            env = ENV | {"MACHINE": str(number)}
            return kit.start(*net.on(number, *command), "run.pt", "--metrics", "m", env=env, stdout=log, stderr=log)

    def told(line):
        return logs[0].read_text().count(line)

    runs = [start(0), start(1)]
    runs[0].wait_for(lambda: len(kit.metrics("m", "step")) > 15, timeout=90)
    if fault == "killed":
        kill_machine(kit, 1)
    else:
        net.cable(1, "down")
    runs[0].wait_for(lambda: told("world size 1,") == 1 and told("goes on from run.pt") == 1, timeout=90)
    if fault == "killed":
        runs[1] = start(1)
    else:
        net.cable(1, "up")
    runs[0].wait_for(lambda: told("world size 2,") == 2 and told("goes on from run.pt") == 2, timeout=90)
    (kit.path / "slow").unlink()
    assert [run.result(60).status for run in runs] == [0, 0], logs[0].read_text()
    assert kit.metrics("m", "end")[0]["step"] == 60 * 14
    one, several = weights(kit, "alone.pt"), weights(kit, "run.pt")
    assert max((one[name] - several[name]).abs().max().item() for name in one) < 1e-9


@pytest.mark.slow
def test_elastic_takes_one_more(kit, machines):
    """Two machines stop their ranks for a third one: neither takes that for the end of the run."""
    pause = "            __import__('time').sleep(0.1 * (not __import__('os').path.exists('fast')))\n"
    kit.edit("ddp_torchrun.py", "            run.record(loss)\n", f"{pause}            run.record(loss)\n")
    net = machines(3)
    command = (SCRIPT, "--elastic=2:3", "--master-addr=10.0.0.1", "--", "ddp_torchrun.py", "--epochs", "40")
    options = ("--snapshot", "s.pt", "--metrics", "m")
    runs = [kit.start(*net.on(number, *command, *options), env=ENV) for number in (0, 1)]
    runs[0].wait_for(lambda: len(kit.metrics("m", "step")) > 3, timeout=90)
    runs.append(kit.start(*net.on(2, *command, *options), env=ENV))
    runs[0].wait_for(lambda: [line for line in kit.metrics("m", "start") if line["world_size"] == 3], timeout=90)
    (kit.path / "fast").touch()
    results = [run.result(90) for run in runs]
    assert [result.status for result in results] == [0, 0, 0], results
    assert kit.metrics("m", "end")[0]["step"] == 40 * 14

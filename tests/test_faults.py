"""A rank that fails, is killed or is stuck: all end, and the last lines say which, where, at which step and why."""

import json
import os
import re
import shutil
import signal
import socket
import sys

import pytest
import torch
from harness import PYTHON, ROOT, forked, forked_ranks, free_port, torchrun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SPAWN = forked("ddp_spawn.py")
PAIRS = forked("model_parallel_ddp.py")
RANKS = forked_ranks(2, "ddp_torchrun.py")
TORCHRUN = torchrun(2, "ddp_torchrun.py")
RANK = f"rank 1 on {socket.gethostname()}"
STEP = "in step 5/14 of epoch 1"
GONE = f"{RANK} is gone, killed or ended by itself, {STEP}"

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FAULTS = {  # what rank 1 runs: what is said under spawn, and under torchrun, of which only the ranks can speak
    "raise ValueError('no luck')": [f"{RANK} failed {STEP}: ValueError: no luck"] * 2,
    "sys.exit(0)": [f"{RANK} left by sys.exit(0), before the training was finished, {STEP}"] * 2,
    "os._exit(0)": [f"{RANK} left with status 0 before its training was finished {STEP}", GONE],
    "os._exit(3)": [f"{RANK} left with status 3 before its training was finished {STEP}", GONE],
    KILL: [f"{RANK} was killed by SIGKILL {STEP}", GONE],
    "os.kill(os.getpid(), signal.SIGSTOP)": [f"{RANK} has not answered for 10 s {STEP}: it was stopped by a signal"]
    * 2,
    "while True: pass": [f"{RANK} has not answered for 10 s {STEP}: it does something else, see its stack above"] * 2,
}


@pytest.mark.parametrize(
    "command, code",
    [
        pytest.param(command, code, marks=pytest.mark.slow if command == TORCHRUN or "STOP" in code else ())
        for code in FAULTS
        for command in (SPAWN, PAIRS, RANKS, TORCHRUN)
        if (command != PAIRS or "raise" in code) and (command != RANKS or code == KILL)
    ],
)
def test_rank_that_fails_or_is_stuck(kit, command, code):
    kit.fault(code)
    seconds = "10" if command == TORCHRUN else "4"
    result = kit.run(*command, "--timeout", seconds, timeout=120)
    line = FAULTS[code][command in (RANKS, TORCHRUN)].replace("10 s", f"{seconds} s")
    assert [error[: len(line) + 7] for error in result.errors] == [f"error: {line}"], result
    assert "closed by peer" not in result.err
    traces = result.err.partition("closing signal SIGTERM")[0].count("Traceback")  # torchrun has one of itself
    if command == TORCHRUN:
        summary = result.err.partition("Root Cause (first observed failure):")[2]
        assert line in summary or ("rank      : 1 (" in summary and "exitcode  : 1 " not in summary), summary
        assert result.status == 1
    else:
        assert traces == ("raise" in code)
        assert result.err.splitlines()[-1].startswith("error: ")
        assert result.status == (1 if command == RANKS else {KILL: 137, "os._exit(3)": 3}.get(code, 1))  # rank 0's
    if "raise" in code:
        assert traces == 1 and "ValueError: no luck" in result.err
    assert "while" not in code or 'job.py", line' in result.err, "its stack"


@pytest.mark.parametrize("code", ["raise ValueError('no luck')", KILL])
def test_fault_of_rank_0_that_serves_the_store(kit, code):
    kit.fault(code, rank=0)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = forked("ddp_torchrun.py", "--timeout", "10")
    runs = [kit.start(*command, env=env | {"RANK": str(rank)}) for rank in range(2)]
    zero, one = [run.result(120) for run in runs]
    assert zero.status == (1 if "raise" in code else -9) and one.status == 1
    gone = f"error: rank 0 on {socket.gethostname()}, which serves the store, is gone: rank 1 lost it {STEP}"
    if "raise" in code:  # rank 1 may still learn what rank 0 told, or not
        assert zero.errors == ["error: " + FAULTS[code][0].replace("rank 1", "rank 0")]
        assert one.errors in ([], [gone])
    else:
        assert one.errors == [gone]


@pytest.mark.slow
def test_store_that_does_not_answer(kit):
    """Rank 0, which serves it, is stopped."""
    kit.fault("os.kill(os.getpid(), signal.SIGSTOP)", rank=0)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = forked("ddp_torchrun.py", "--timeout", "10")
    runs = [kit.start(*command, env=env | {"RANK": str(rank)}) for rank in range(2)]
    one = runs[1].result(120)
    assert one.status == 1
    assert one.errors == [
        f"error: rank 0 on {socket.gethostname()}, which serves the store, does not answer: rank 1 lost it {STEP}"
    ], one
    kit.kill_all()


def test_all_ranks_fail_alike(kit):
    kit.fault("raise ValueError('no luck')", rank="' or '1' == '1")
    result = kit.run(*SPAWN, "--nprocs", "3", timeout=120)
    assert result.status == 1 and len(result.errors) == 1 and result.err.count("Traceback") == 1


LOOP = "        for inputs, labels in run.batches():\n"
AFTER = "        run.evaluate(test_set)\n"
LEFT = f"rank 1 left the loop over the batches {STEP}, and others did not: break on all ranks at the same step"


@pytest.mark.parametrize(
    "command, place, code, line",
    [
        (SPAWN, LOOP, "if rank == 1 and run.step_count == 4: break", LEFT),
        pytest.param(
            RANKS,
            LOOP,
            "if torch.distributed.get_rank() == 1 and run.step_count == 4: break",
            LEFT,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SPAWN,
            AFTER,
            "if rank == 1: break",
            f"{RANK} ended its training in the end of epoch 1, others are in step 1/14 of epoch 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_leaving_the_training_too_soon(kit, command, place, code, line):
    script = next(word for word in command if word.endswith(".py"))
    kit.edit(script, place, f"{place}{' ' * (12 if place == LOOP else 8)}{code}\n")
    result = kit.run(*command, "--timeout", "4", timeout=120)
    assert result.status == 1 and len(result.errors) == 1 and result.errors[0].startswith(f"error: {line}"), result


@pytest.mark.parametrize("command", [SPAWN, pytest.param(RANKS, marks=pytest.mark.slow)], ids=["spawn", "ranks"])
def test_validation_on_rank_0_alone(kit, command):
    """Nobody is to blame for sure: the line says where each rank was."""
    script = next(word for word in command if word.endswith(".py"))
    kit.edit(script, AFTER, f"        if torch.distributed.get_rank() == 0:\n    {AFTER}")
    result = kit.run(*command, "--timeout", "4", timeout=120)
    assert result.status == 1 and len(result.errors) == 1, result
    assert "rank 0 in the evaluation after epoch 1" in result.errors[0], result
    assert "rank 1 in " in result.errors[0], result


def test_line_stays_short_however_many_ranks_there_are():
    sys.path.insert(0, str(ROOT))
    from common.place import Ranks
    from common.watch import Watch

    store = torch.distributed.HashStore()
    for rank in range(1024):
        watch = Watch(store, Ranks(rank, 1024, rank % 16, 16, "torchrun"))
        watch.host = f"h{rank // 16}"
        watch.announce(rank, 0)
    line = watch.names(range(1024))
    assert line.startswith("rank 0, 1, 2, 3, 4, 5, 6, 7 and 8 more on h0; rank 16, ")
    assert line.endswith(" on h7 and 56 machines more")


def test_leaving_the_training_together(kit):
    kit.edit("ddp_spawn.py", AFTER, "        if run.evaluate(test_set)['accuracy'] > 0.2: break\n")
    result = kit.run(*SPAWN, timeout=120)
    assert result.status == 0 and "epoch 1/20: " in result.out and "epoch 2/20" not in result.out
    assert "done: 1 epochs, 14 steps, " in result.out


@pytest.mark.parametrize("command", [SPAWN, forked("dp_train.py")], ids=["spawn", "dp"])
def test_leaving_an_epoch_together(kit, command):
    kit.edit(command[1], LOOP, f"{LOOP}            if (run.epoch, run.step) == (0, 4): break\n")
    result = kit.run(*command, "--epochs", "2", "--metrics", "m", timeout=120)
    assert result.status == 0 and "done: 2 epochs, 18 steps, " in result.out, result
    steps = kit.metrics("m", "step")
    assert [(line["epoch"], line["step"]) for line in steps] == [(1 + (step > 4), step) for step in range(1, 19)]
    assert [line["step"] for line in kit.metrics("m", "eval")] == [4, 18]
    assert f"epoch 1/2: loss {sum(line['loss'] for line in steps[:4]) / 4:.4f}, " in result.out


@pytest.mark.slow
def test_rank_that_is_stuck_after_the_training(kit):
    old = "    if watch := process.watch:\n"
    kit.edit("common/group.py", old, f"    dist.get_rank() == 1 and os.kill(os.getpid(), 19)\n{old}")
    result = kit.run(*TORCHRUN, "--epochs", "1", "--timeout", "10", timeout=120)
    assert result.status == 1
    assert result.errors[0].startswith(f"error: {RANK} has not answered for 10 s in the end: it was stopped"), result


@pytest.mark.slow
def test_signal_to_one_rank(kit):
    kit.fault("os.kill(os.getpid(), signal.SIGTERM)")
    result = kit.run(*TORCHRUN, "--timeout", "10", timeout=120)
    assert result.status == 1 and result.errors == [f"error: {RANK} was ended by SIGTERM {STEP}"], result


@pytest.mark.slow
def test_mpirun_is_killed(kit):
    """Its ranks end with it."""
    if not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", PYTHON)
    run = kit.start(*mpirun, "ddp_torchrun.py", "--epochs", "100000", "--metrics", "metrics.jsonl")
    run.wait_for(lambda: kit.metrics(event="step"))
    os.kill(run.pid, signal.SIGKILL)
    assert not run.result(60).processes


NAN = f"{RANK} is nan {STEP}, 5 in all; the learning rate is now "


@pytest.mark.parametrize(
    "command, options",
    [
        (SPAWN, ("--metrics", "m")),
        (SPAWN, ("--snapshot", "run.pt", "--save-every", "1")),
        (SPAWN, ()),
        (SPAWN, ("--epochs", "1", "--accum", "2")),
        pytest.param(TORCHRUN, ("--snapshot", "run.pt", "--save-every", "1"), marks=pytest.mark.slow),
    ],
)
def test_loss_that_is_not_finite(kit, command, options):
    """On one rank; both stop, and nothing of it is written."""
    kit.fault("model.net2.bias.data.fill_(float('nan'))", call=9 if "--accum" in options else 5)
    result = kit.run(*command, *options, timeout=120)
    saved = "; run.pt is of a step before" if "--snapshot" in options else ""
    line = rf"error: the loss of {re.escape(NAN)}0\.\d+: lower --lr, or try --clip 1{re.escape(saved)}"
    assert result.status == 1 and len(result.errors) == 1 and re.fullmatch(line, result.errors[0]), result
    assert [line["step"] for line in kit.metrics("m", "step")] == ([1, 2, 3, 4] if "--metrics" in options else [])
    if saved:
        state = torch.load(kit.path / "run.pt", weights_only=True)
        assert state["run"]["position"]["step_count"] == 4
        assert all(value.isfinite().all() for value in state["model"].values())


def test_weights_that_are_not_finite(kit):
    """The step's loss was, and they would be saved before the next one."""
    last = "                optimizer.zero_grad()\n"
    kit.edit("dp_train.py", last, f"{last}                model.net1.weight.data.fill_(float('inf'))\n")
    result = kit.run(*forked("dp_train.py", "--snapshot", "run.pt", "--save-every", "1"), timeout=120)
    assert result.status == 1 and not (kit.path / "run.pt").exists()
    line = "error: --snapshot run.pt of step 1 was not written: net1.weight is not finite: lower --lr, or try --clip 1"
    assert len(result.errors) == 1 and result.errors[0].startswith(line)


@pytest.mark.parametrize(
    "command, status",
    [
        (SPAWN, 2),
        (forked("dp_train.py"), 0),
        pytest.param(TORCHRUN, 1, marks=pytest.mark.slow),
    ],
    ids=["spawn", "dp", "torchrun"],
)
def test_parameters_without_a_gradient(kit, command, status):
    layer = "        self.relu = nn.ReLU()\n"
    kit.edit("common/job.py", layer, f"{layer}        self.extra = nn.Linear(2, 2)\n")
    result = kit.run(*command, "--epochs", "2", timeout=120)
    assert result.status == status
    line = "no gradient reaches extra.weight, extra.bias"
    if status:
        advice = "use them in forward, set requires_grad=False, or give DDP find_unused_parameters=True"
        assert result.errors == [f"error: {line}: {advice}"], result
    else:
        assert result.out.count(line) == 1


def test_run_without_a_gradient_for_some_parameters(kit):
    """DDP that is told of it goes on."""
    layer = "        self.relu = nn.ReLU()\n"
    kit.edit("common/job.py", layer, f"{layer}        self.extra = nn.Linear(2, 2)\n")
    views = "gradient_as_bucket_view=True,"
    kit.edit("ddp_torchrun.py", views, f"{views} find_unused_parameters=True,")
    result = kit.run(*RANKS, "--epochs", "2", timeout=120)
    assert result.status == 0 and result.out.count("no gradient reaches extra.weight, extra.bias") == 1


SAMPLE = """


class Watched(TensorDataset):
    def __getitem__(self, index):
        import os, signal, torch

        worker = torch.utils.data.get_worker_info()
        if worker and os.environ.get("RANK") == "1" and len(self) > 1000:
            {code}
        return super().__getitem__(index)
"""


@pytest.mark.parametrize(
    "command, code, words",
    [
        (SPAWN, "raise ValueError('a bad sample')", "ValueError: a bad sample"),
        (SPAWN, KILL, " exited unexpectedly"),
        pytest.param(TORCHRUN, KILL, " exited unexpectedly", marks=pytest.mark.slow),
        pytest.param(TORCHRUN, "raise ValueError('a bad sample')", "ValueError: a bad sample", marks=pytest.mark.slow),
        pytest.param(
            ("python", "ddp_spawn.py"),
            "raise ValueError('a bad sample')",
            "ValueError: a bad sample",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SPAWN, "os.kill(os.getpid(), signal.SIGSTOP)", "DataLoader timed out after 10.0 s", marks=pytest.mark.slow
        ),
    ],
)
def test_loader_worker_that_fails(kit, command, code, words):
    kit.edit("common/job.py", "    return TensorDataset(pixels[~in_test]", "    return Watched(pixels[~in_test]")
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(SAMPLE.format(code=code))
    result = kit.run(*command, "--workers", "2", "--timeout", "10", timeout=120)
    assert result.status == 1
    assert len(result.errors) == 1, result
    assert f"error: {RANK} failed in step 1/14 of epoch 1: " in result.errors[0] and words in result.errors[0], result


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods_of_loader_workers(kit, method):
    """As on macOS and Windows, and as Python 3.14 has it; the workers end with a launcher that is killed."""
    kit.edit(
        "common/loading.py",
        "num_workers=args.workers,",
        f"num_workers=args.workers, multiprocessing_context='{method}',",
    )
    assert kit.run("python", "ddp_spawn.py", "--epochs", "1", "--workers", "1", "--metrics", "m").status == 0
    assert kit.run("python", "dp_train.py", "--epochs", "1", "--metrics", "m", "--workers", "1").status == 0
    one, other = kit.metrics("m", "eval")
    assert one["accuracy"] == other["accuracy"]
    run = kit.start("python", "ddp_spawn.py", "--epochs", "100000", "--workers", "1", "--metrics", "killed")
    run.wait_for(lambda: kit.metrics("killed", "step"))
    os.kill(run.pid, signal.SIGKILL)
    assert not run.result(60).processes


@pytest.mark.parametrize(
    "which", ["missing", "truncated", "no gzip", "row", pytest.param("rank", marks=pytest.mark.slow)]
)
def test_data_that_is_wrong(kit, which):
    path = kit.path / "data" / "digits.csv.gz"
    command, words = SPAWN, ""
    if which == "missing":
        path.unlink()
        words = " not found."
    elif which == "truncated":
        path.write_bytes(path.read_bytes()[:20000])
        words = ": Compressed file ended before the end-of-stream marker was reached"
    elif which == "no gzip":
        path.write_text("1,2,3")
        words = ": Not a gzipped file (b'1,')"
    elif which == "row":
        import gzip

        rows = gzip.decompress(path.read_bytes()).splitlines()
        path.write_bytes(gzip.compress(b"\n".join([*rows[:9], b"1,2,3", *rows[9:]])))
        command, words = forked("dp_train.py"), "from 65 to 3 at row 10"
    else:  # only one rank sees it
        kit.edit("common/job.py", '"digits.csv.gz"', "f\"{__import__('os').environ['RANK']}.csv.gz\"")
        path.rename(path.with_name("0.csv.gz"))
        path, command, words = path.with_name("1.csv.gz"), TORCHRUN, " not found."
    result = kit.run(*command, timeout=120)
    assert result.status == (1 if which == "rank" else 2)
    assert len(result.errors) == 1 and result.errors[0].startswith(f"error: {path}") and words in result.errors[0], (
        result
    )
    assert result.err.partition("closing signal")[0].count("Traceback") == 0


def test_metrics_are_json(kit):
    """Also where a loss is not finite: Python would write NaN, which no other program reads."""
    kit.run(*forked("dp_train.py", "--lr", "1e9", "--metrics", "m"), timeout=120)
    text = (kit.path / "m").read_text()
    assert text and all(json.loads(line, parse_constant=pytest.fail) for line in text.splitlines())


@pytest.mark.slow
def test_rank_that_does_not_come(kit):
    kit.edit("common/group.py", "    host = None", "    ranks.rank == 1 and os.kill(os.getpid(), 19)\n    host = None")
    result = kit.run(*SPAWN, "--timeout", "10", timeout=120)
    assert result.status == 1
    assert len(result.errors) == 1 and result.errors[0].startswith("error: waited "), result
    node = f"node 0 ({socket.gethostname()})"
    assert result.errors[0].endswith(f" s in vain for {node} local rank 1; here is {node} local rank 0")

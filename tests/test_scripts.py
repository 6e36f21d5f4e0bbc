"""The bare commands: they train, report and leave nothing behind."""

import fcntl
import os
import re
import signal
import struct
import termios

import pytest
import torch
from harness import ROOT, forked, forked_ranks, torchrun

COMMANDS = {
    "dp_train": ("python", "dp_train.py"),
    "ddp_spawn": ("python", "ddp_spawn.py"),
    "ddp_torchrun": forked("ddp_torchrun.py"),
    "torchrun": torchrun(2, "ddp_torchrun.py"),
    "model_parallel_ddp": forked("model_parallel_ddp.py"),
}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=pytest.mark.versions if name in ("torchrun", "ddp_spawn") else ())
        for name, command in COMMANDS.items()
    ],
)
def test_bare_command_trains(kit, command):
    result = kit.run(*command, "--metrics", "metrics.jsonl")
    assert result.status == 0, result.err

    start, *_ = kit.metrics()
    assert (start["event"], start["epochs"], start["torch"]) == ("start", 20, torch.__version__)
    steps = kit.metrics(event="step")
    losses, rates = [line["loss"] for line in steps], [line["lr"] for line in steps]
    assert len(losses) == 20 * (1438 // 96)
    assert rates == pytest.approx([0.2 * min(1, number / 20) for number in range(1, 281)]), "the schedule's"
    assert sum(losses[-14:]) < 0.1 * sum(losses[:14])
    evals = kit.metrics(event="eval")
    assert [line["epoch"] for line in evals] == list(range(1, 21))
    assert all(line["total"] == 359 for line in evals)
    assert all(line["set"] == "test" for line in evals)
    assert evals[-1]["accuracy"] >= 0.97 and evals[-1]["loss"] < 0.2
    right = evals[-1]["accuracy"] * 359
    assert right == pytest.approx(round(right), abs=1e-6), "each sample counts once"
    (end,) = kit.metrics(event="end")
    assert end["accuracy"] == evals[-1]["accuracy"] and end["test_loss"] == evals[-1]["loss"] and end["step"] == 280
    assert re.fullmatch("[0-9a-f]{64}", end["weights_sha256"])

    epochs = [line for line in result.out.splitlines() if line.startswith("epoch ")]
    assert len(epochs) == 20, "one line an epoch, from one rank"
    mean = sum(losses[-14:]) / 14
    assert end["loss"] == pytest.approx(mean) and end["world_size"] == start["world_size"]
    words = f"loss {mean:.4f}, lr 0.2, test accuracy {end['accuracy']:.4g}, test loss {end['test_loss']:.4g}"
    assert epochs[-1] == f"epoch 20/20: {words}"
    summary = result.out.splitlines()[-1]
    assert re.fullmatch(
        f"done: 20 epochs, 280 steps, {re.escape(words)}, [1-9]\\d* samples/s, \\d+\\.\\d s in all", summary
    ), summary
    assert "\r" not in result.out + result.err, "a progress bar went into a pipe"


def modules_for(script):
    """The modules of `common` that the README names for a script on one machine."""
    rows = dict(
        re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", (ROOT / "README.md").read_text().split("## What to cut")[1], re.M)
    )
    text = rows[script].partition(";")[0]
    names = re.findall(r"`(\w+)`", text)
    if other := re.search(r"as for `(\S+\.py)`", text):
        return modules_for(other[1]) + names
    return (modules_for("dp_train.py") if "these" in text else []) + names


@pytest.mark.parametrize(
    "command",
    [*(forked(f"{name}.py") for name in COMMANDS if name != "torchrun"), forked_ranks(2, "ddp_torchrun.py")],
    ids=" ".join,
)
def test_what_a_script_needs_is_what_the_readme_says(kit, command):
    script = command[1]
    keep = {f"{module}.py" for module in modules_for(script)}
    for path in kit.path.rglob("*"):
        if path.is_file() and path.parent.name != "data" and path.name not in keep | {script}:
            path.unlink()
    assert {path.name for path in (kit.path / "common").glob("*.py")} == keep
    options = ("--snapshot", "run.pt", "--metrics", "m")
    run = kit.start(*command, *options, "--epochs", "100000")
    run.wait_for(lambda: kit.metrics("m", "step"))
    os.kill(run.pid, signal.SIGTERM)
    stopped = run.result(60)
    assert stopped.status == 143 and not stopped.processes, stopped
    step = len(kit.metrics("m", "step"))
    result = kit.run(*command, *options, "--steps", step + 3, "--epochs", "100000")
    assert result.status == 0 and "goes on from run.pt after step " in result.out, result
    assert [line["step"] for line in kit.metrics("m", "step")] == list(range(1, step + 4))


def test_steps_end_the_run(kit):
    result = kit.run(*forked("ddp_spawn.py", "--steps", "20", "--metrics", "metrics.jsonl", "--log-every", "5"))
    assert result.status == 0, result.err
    assert [line["step"] for line in kit.metrics(event="step")] == [5, 10, 15, 20]
    assert [line["step"] for line in kit.metrics(event="eval")] == [14, 20]
    assert result.out.splitlines()[-1].startswith("done: 2 epochs, 20 steps, ")


def test_same_arguments_same_weights(kit):
    options = ("--epochs", "2", "--metrics", "metrics.jsonl")
    spawn, alone = forked("ddp_spawn.py", "--nprocs", "2"), forked("dp_train.py")
    for command in (spawn, forked_ranks(2, "ddp_torchrun.py"), alone, alone, (*alone, "--seed", "1")):
        assert kit.run(*command, *options).status == 0
    digests = [line["weights_sha256"] for line in kit.metrics(event="end")]
    assert digests[0] == digests[1] and digests[2] == digests[3] != digests[4]


@pytest.mark.parametrize(
    "command",
    [forked("ddp_spawn.py"), pytest.param(COMMANDS["torchrun"], marks=pytest.mark.slow)],
    ids=["spawn", "torchrun"],
)
def test_two_copies_at_once(kit, command):
    runs = [kit.start(*command, "--epochs", "3", "--metrics", f"{number}.jsonl") for number in range(2)]
    assert [run.result().status for run in runs] == [0, 0]
    digests = {kit.metrics(f"{number}.jsonl", "end")[0]["weights_sha256"] for number in range(2)}
    assert len(digests) == 1 and not kit.processes() and not kit.temporary_files()


def test_progress_bar_on_a_terminal(kit):
    terminal, ours = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # without a width tqdm draws nothing
    kit.first(f"import os\nos.dup2(os.open({os.ttyname(ours)!r}, os.O_WRONLY | os.O_NOCTTY), 2)\nopen('opened', 'x')")
    run = kit.start(*forked("first.py", "ddp_spawn.py", "--epochs", "2"))
    run.wait_for(lambda: (kit.path / "opened").exists())
    os.close(ours)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(terminal)
    result = run.result()
    assert result.status == 0
    assert b"epoch 1/2:" in shown and b"epoch 2/2:" in shown and b"/14 [" in shown
    assert [line.split(":")[0] for line in result.out.splitlines()[1:]] == ["epoch 1/2", "epoch 2/2", "done"]


@pytest.mark.slow
def test_tensorboard(kit):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ("--epochs", "2", "--metrics", "metrics.jsonl", "--tensorboard", "board", "--log-every", "7")
    assert kit.run(*forked("ddp_spawn.py", *options)).status == 0
    board = EventAccumulator(str(kit.path / "board"))
    board.Reload()
    steps = kit.metrics(event="step")
    assert [event.step for event in board.Scalars("loss")] == [7, 14, 21, 28]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([line["loss"] for line in steps])
    assert [event.value for event in board.Scalars("lr")] == pytest.approx([line["lr"] for line in steps])
    evals = kit.metrics(event="eval")
    for name in ("accuracy", "loss"):
        found = [(event.step, event.value) for event in board.Scalars(f"test/{name}")]
        assert found == [(line["step"], pytest.approx(line[name])) for line in evals]
    assert len(evals) == 2


def test_without_tensorboard(kit):
    # A directory before site-packages in which the package cannot be imported stands for its absence.
    (kit.path / "tensorboard.py").write_text("raise ImportError('not installed')")
    result = kit.run(*forked("ddp_spawn.py", "--tensorboard", "board"))
    assert result.status == 2
    assert result.errors == ["error: --tensorboard board: not installed"]


@pytest.mark.parametrize(
    "precision, nprocs",
    [("fp16", 2), ("bf16", 1)],
)
def test_autocast_trains_on_the_cpu(kit, precision, nprocs):
    options = ("--nprocs", nprocs, "--precision", precision, "--clip", "5", "--metrics", "metrics.jsonl")
    assert kit.run(*forked("ddp_spawn.py", *options)).status == 0
    assert kit.metrics(event="end")[0]["accuracy"] >= 0.97


def test_workers_change_nothing(kit):
    for workers in (0, 2):
        options = ("--epochs", "2", "--workers", workers, "--metrics", "metrics.jsonl")
        assert kit.run(*forked("ddp_spawn.py", *options)).status == 0
    first, second = kit.metrics(event="end")
    assert first["weights_sha256"] == second["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [pytest.param("ddp_torchrun.py", marks=pytest.mark.versions), "model_parallel_ddp.py"]
)
def test_compile(kit, script):
    options = ("--precision", "fp64", "--epochs", "2", "--metrics", "metrics.jsonl")
    assert kit.run("python", script, *options).status == 0
    result = kit.run("python", script, *options, "--compile", timeout=300)
    assert result.status == 0, result.err
    plain, compiled = (kit.metrics(event="step")[start : start + 28] for start in (0, 28))
    assert [line["loss"] for line in compiled] == pytest.approx([line["loss"] for line in plain], abs=1e-9)

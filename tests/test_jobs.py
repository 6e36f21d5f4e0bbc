"""Whole jobs in place of common/job.py keep every promise, with every DDP script, at every world size."""

import functools
import itertools
import shutil

import pytest
import torch
from harness import ROOT, Kit, forked, forked_ranks, torchrun

# Each job's learning rate, and the step in which a rank is killed, in the midst of the second epoch.
JOBS = {"cnn": ("0.003", 38), "gpt": ("0.01", 14), "regression": ("0.05", 14)}

COMMANDS = {
    **{f"spawn-{n}": forked("ddp_spawn.py", "--nprocs", n) for n in (1, 2, 3)},
    **{f"ranks-{n}": forked_ranks(n, "ddp_torchrun.py") for n in (1, 2, 3)},
    **{f"pairs-{n}": forked("model_parallel_ddp.py", "--nprocs", n) for n in (1, 2, 3)},
    "pairs-ranks-2": forked_ranks(2, "model_parallel_ddp.py"),
    "torchrun-2": torchrun(2, "ddp_torchrun.py"),
}

# What a user adds to a script for an EMA and a second optimizer.
LINES = {
    "    run = Run(": (
        "    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)\n"
        "    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)\n"
        "    second = torch.optim.Adam(model.net.head.parameters(), lr=args.lr / 10)\n    run = Run("
    ),
    "scaler=scaler)\n": "scaler=scaler, ema=ema, second=second)\n",
    "scaler.unscale_(optimizer)\n": "scaler.unscale_(optimizer)\n                scaler.unscale_(second)\n",
    "scaler.step(optimizer)\n": "scaler.step(optimizer)\n                scaler.step(second)\n",
    "scaler.update()\n": "scaler.update()\n                ema.update_parameters(model)\n",
    "optimizer.zero_grad()\n": "optimizer.zero_grad()\n                second.zero_grad()\n",
}

# The last rank dies in this forward pass of training, as soon as the snapshot of two steps before is written.
DIE = """

def die(model, _, calls=[]):
    import os
    import time

    if not isinstance(model, ToyModel) or not model.training:
        return
    calls.append(1)
    last = torch.distributed.get_world_size() - 1
    if os.environ.get("DIE") == str(len(calls)) and torch.distributed.get_rank() == last:
        while torch.load("run.pt", weights_only=True)["run"]["position"]["step_count"] < len(calls) - 2:
            time.sleep(0.05)
        os.kill(os.getpid(), 9)


nn.modules.module.register_module_forward_pre_hook(die)
"""


def put(kit, job):
    """Put a job in; cnn-plain is the cnn without what depends on the rank, so that it has the shift alone."""
    name = job.removesuffix("-plain")
    shutil.copy(ROOT / "tests" / "jobs" / f"{name}.py", kit.path / "common" / "job.py")
    if name != job:
        for layer in ("nn.BatchNorm2d(8)", "nn.BatchNorm2d(16)", "nn.Dropout(0.2)"):
            kit.edit("common/job.py", layer, "nn.Identity()")
    if name == "regression":
        for script in ("ddp_spawn.py", "ddp_torchrun.py", "model_parallel_ddp.py"):
            for old, new in LINES.items():
                kit.edit(script, old, new)
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(DIE)
    rate, kit.step = JOBS[name]
    kit.options = ("--epochs", "2", "--batch-size", "48", "--threads", "1", "--lr", rate)


def train(kit, command, name, *options):
    """Run to the end with a snapshot of this name; what is named in Run, as it was saved, and the log."""
    result = kit.run(*command, *kit.options, *options, "--snapshot", f"{name}.pt", "--metrics", f"{name}.jsonl")
    assert result.status == 0, result
    state = torch.load(kit.path / f"{name}.pt", weights_only=True)
    position = state.pop("run")["position"]
    assert position["step_count"] == kit.metrics(f"{name}.jsonl", "end")[-1]["step"]
    return state, kit.metrics(f"{name}.jsonl")


def train_until_killed(kit, command, *options):
    """Let a rank be killed in the midst of the second epoch."""
    options = (*kit.options, *options, "--snapshot", "run.pt", "--save-every", "4")
    result = kit.start(*command, *options, env={"DIE": str(kit.step)}).result()
    assert result.status != 0 and not result.processes, result
    position = torch.load(kit.path / "run.pt", weights_only=True)["run"]["position"]
    assert position["epoch"] == 1 and position["step"] > 0 and position["step_count"] == kit.step - 2
    for path in kit.temporary.iterdir():  # what a killed process could not remove
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A function of a job: what one process ends with in fp64."""

    @functools.cache
    def states(job):
        kit = Kit(tmp_path_factory.mktemp(job))
        put(kit, job)
        with kit.directory:
            return train(kit, forked("ddp_torchrun.py"), "one", "--precision", "fp64")[0]

    return states


def close(found, expected, tolerance):
    """Assert that nested states are equal, but for this absolute difference of numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        close([found[key] for key in expected], [*expected.values()], tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other, tolerance)
    elif isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def cases(jobs, commands, *soon):
    """All jobs with all commands; slow, but for those that are to run soon."""
    return [
        pytest.param(*case, id="-".join(case).replace(" ", "-"), marks=() if case in soon else pytest.mark.slow)
        for case in itertools.product(jobs, commands)
        if case[1] != "torchrun-2" or case[0] in ("gpt", "cnn-plain")  # the others take long, and bring nothing new
    ]


@pytest.mark.parametrize("job, command", cases(["cnn-plain"], COMMANDS))
def test_same_random_shifts(kit, reference, job, command):
    """Loader workers draw the same random shifts as the process of the reference does itself."""
    put(kit, job)
    state, log = train(kit, COMMANDS[command], "run", "--precision", "fp64", "--workers", "1")
    close(state, reference(job), 1e-9)
    scores = [line for line in log if line["event"] == "eval"]
    assert len(scores) == 2 and scores[1]["loss"] < scores[0]["loss"]


@pytest.mark.parametrize("job, command", cases(JOBS, COMMANDS, ("gpt", "spawn-2"), ("regression", "pairs-3")))
def test_same_result_also_after_a_kill(kit, reference, job, command):
    """All that is named is within 1e-9 of one process's; killed and started again, it is the same bit for bit.

    The losses and learning rates of the steps are as well. What the cnn ends with depends on the number of ranks.
    """
    put(kit, job)
    precision = () if job == "cnn" else ("--precision", "fp64")
    expected, undisturbed = train(kit, COMMANDS[command], "whole", "--save-every", "4", *precision)
    if job != "cnn":
        close(expected, reference(job), 1e-9)
    train_until_killed(kit, COMMANDS[command], *precision)
    found, resumed = train(kit, COMMANDS[command], "run", "--save-every", "4", *precision)
    close(found, expected, 0)
    steps, again = ([line for line in log if line["event"] == "step"] for log in (undisturbed, resumed))
    assert again == steps[-len(again) :] and again[0]["step"] == kit.step - 1
    assert len({line["lr"] for line in steps}) >= 2
    assert resumed[-1]["weights_sha256"] == undisturbed[-1]["weights_sha256"]
    scores = [line for line in undisturbed if line["event"] == "eval"]
    assert len(scores) == 2 and scores[1]["loss"] < scores[0]["loss"]


@pytest.mark.parametrize(
    "job, change",
    cases(
        ["cnn-plain", "gpt", "regression"],
        ["spawn-2 ranks-3", "ranks-3 pairs-1", "pairs-1 spawn-2", "pairs-ranks-2 torchrun-2"],
        ("gpt", "pairs-1 spawn-2"),
    ),
)
def test_resumed_at_another_world_size(kit, reference, job, change):
    """A rank is killed, and other processes go on, with the same samples."""
    put(kit, job)
    before, after = (COMMANDS[name] for name in change.split())
    train_until_killed(kit, before, "--precision", "fp64")
    close(train(kit, after, "run", "--precision", "fp64")[0], reference(job), 1e-9)

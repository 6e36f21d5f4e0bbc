"""Every pattern at every world size takes the same steps: the agreement test."""

import functools

from common import job

import pytest
import torch
from harness import PYTHON, forked, forked_ranks, torchrun
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, BATCH, SEED = 3, 48, 3
OPTIONS = ("--precision", "fp64", "--epochs", EPOCHS, "--batch-size", BATCH, "--seed", SEED)
LAUNCH = (PYTHON, "-m", "torch.distributed.launch")

COMMANDS = {
    "dp": forked("dp_train.py"),
    "dp-accum-4": forked("dp_train.py", "--accum", "4"),
    **{f"spawn-{n}": forked("ddp_spawn.py", "--nprocs", n) for n in (1, 2, 3, 4)},
    "spawn-accum-2": forked("ddp_spawn.py", "--accum", "2"),
    "alone": forked("ddp_torchrun.py"),
    **{f"ranks-{n}": forked_ranks(n, "ddp_torchrun.py") for n in (1, 2, 4)},
    "ranks-accum-4": forked_ranks(2, "ddp_torchrun.py", "--accum", "4"),
    "torchrun": torchrun(2, "ddp_torchrun.py", "--accum", "2"),
    "launch": (*LAUNCH, "--nproc_per_node=2", "ddp_torchrun.py"),
    "model-parallel": forked("model_parallel_ddp.py"),
    "model-parallel-torchrun": torchrun(2, "model_parallel_ddp.py"),
    "model-parallel-accum-2": forked("model_parallel_ddp.py", "--nprocs", "1", "--accum", "2"),
}


@functools.cache
def plain_loop(clip=None):
    """The same job as anyone would write it for one process: (loss of each step, scores of each epoch, weights)."""
    torch.set_default_dtype(torch.float64)
    try:
        train_set, test_set = job.load_data()
        torch.manual_seed(SEED)
        model = job.ToyModel()
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 20, total_iters=19)
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0, seed=SEED)
    losses, scores = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(train_set, BATCH, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            loss = job.loss(model(inputs), labels)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        with torch.no_grad():
            outputs, labels = model(test_set.tensors[0]), test_set.tensors[1]
            scores.append(((outputs.argmax(1) == labels).double().mean().item(), job.loss(outputs, labels).item()))
    return losses, scores, model.state_dict()


def agree(kit, command, *options, clip=None):
    """Run a command in fp64 and return its greatest difference from the plain loop's final weights."""
    # Each rank leaves the weights with which it evaluates.
    kit.edit(
        "common/job.py",
        "        self.net2 = nn.Linear(64, 10)\n",
        "        self.net2 = nn.Linear(64, 10)\n"
        "        self.register_forward_pre_hook(lambda model, _: None if model.training else save(model))\n",
    )
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(
            "\n\ndef save(model):\n    import os\n\n    torch.save(model.state_dict(), f'{os.getpid()}.weights')"
        )
    result = kit.run(*command, *OPTIONS, *options, "--metrics", "metrics.jsonl")
    assert result.status == 0, result.err

    losses, scores, weights = plain_loop(clip)
    assert len(losses) == EPOCHS * (1438 // BATCH)
    assert [line["loss"] for line in kit.metrics(event="step")] == pytest.approx(losses, rel=0, abs=1e-9)
    found = [(line["accuracy"], line["loss"]) for line in kit.metrics(event="eval")]
    assert found == [pytest.approx(one, rel=0, abs=1e-9) for one in scores]
    saved = [torch.load(path, weights_only=True) for path in kit.path.glob("*.weights")]
    assert len(saved) == kit.metrics(event="end")[0]["world_size"]
    assert all(state.keys() == weights.keys() for state in saved)
    return max((state[name] - weights[name]).abs().max().item() for state in saved for name in weights)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=pytest.mark.slow if "-m" in command else ())
        for name, command in COMMANDS.items()
    ],
)
def test_agreement_with_the_plain_loop(kit, command, record_property):
    difference = agree(kit, command)
    record_property("greatest weight difference", difference)
    print(f"greatest weight difference: {difference:.1e}")
    assert difference < 1e-9


@pytest.mark.parametrize(
    "command",
    [COMMANDS["spawn-2"], COMMANDS["ranks-accum-4"]],
    ids=["spawn", "accum"],
)
def test_agreement_of_clipping(kit, command):
    assert agree(kit, command, "--clip", "0.5", clip=0.5) < 1e-9


def test_micro_batches_communicate_once_a_step(kit):
    """DDP's communication hook counts: one all-reduce a step (the model fits into one bucket), whatever --accum is."""
    kit.edit(
        "ddp_spawn.py",
        "    if args.compile:\n",
        "    calls = []\n"
        "    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\n"
        "    hook = lambda state, bucket: (calls.append(1), allreduce_hook(state, bucket))[1]\n"
        "    ddp.register_comm_hook(None, hook)\n"
        "    if args.compile:\n",
    )
    end = "        run.evaluate(test_set)\n"
    kit.edit("ddp_spawn.py", end, f"{end}    rank or print(f'calls {{len(calls)}}')\n")
    result = kit.run(*forked("ddp_spawn.py", "--steps", "10", "--accum", "4"))
    assert result.status == 0, result.err
    assert "calls 10\n" in result.out

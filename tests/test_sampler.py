"""The sampler's order is DistributedSampler's, from any step on."""

import argparse
import itertools

from common import ranks
from common.data import ResumableSampler
from common.errors import UserError

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler


def sampler_of(monkeypatch, size, rank, world_size, batch_size, seed=0, accum=1, epochs=20, steps=None):
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    monkeypatch.setattr(ranks, "world_size", lambda: world_size)
    args = argparse.Namespace(batch_size=batch_size, seed=seed, accum=accum, epochs=epochs, steps=steps, workers=0)
    return ResumableSampler(range(size), args)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [48, 1438, 1440, 70_000])
def test_order_is_that_of_distributed_sampler(monkeypatch, size, world_size):
    for rank in range(world_size):
        ours = sampler_of(monkeypatch, size, rank, world_size, batch_size=48, seed=5)
        theirs = DistributedSampler(range(size), world_size, rank, seed=5, drop_last=True)
        for epoch in (0, 1, 7):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            batches = size // 48 * 48 // world_size
            assert len(ours) == batches
            assert list(ours) == list(theirs)[:batches]


def test_epochs_differ(monkeypatch):
    sampler = sampler_of(monkeypatch, 96, 0, 1, batch_size=48)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 3 and all(sorted(order) == list(range(96)) for order in orders)


@pytest.mark.parametrize("world_size, accum", [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)])
def test_each_step_sees_the_same_samples(monkeypatch, world_size, accum):
    whole = list(sampler_of(monkeypatch, 200, 0, 1, batch_size=24))
    samplers = [sampler_of(monkeypatch, 200, rank, world_size, 24, accum=accum) for rank in range(world_size)]
    loaders = [iter(DataLoader(range(200), sampler.micro_batch, sampler=sampler)) for sampler in samplers]
    for step in range(200 // 24):
        seen = [next(loader).tolist() for loader in loaders for _ in range(accum)]
        assert sorted(itertools.chain(*seen)) == sorted(whole[step * 24 : step * 24 + 24])


def test_start_within_an_epoch_loads_nothing_before(monkeypatch):
    loaded = []

    class Watched(torch.utils.data.Dataset):
        def __getitem__(self, index):
            loaded.append(index)
            return index

    sampler = sampler_of(monkeypatch, 200, 1, 2, batch_size=24)
    whole = list(sampler)
    sampler.set_epoch(0, step=5)
    batches = list(DataLoader(Watched(), sampler.micro_batch, sampler=sampler))
    assert torch.cat(batches).tolist() == loaded == whole[5 * 12 :]
    assert len(sampler) == len(loaded) and len(batches) == 200 // 24 - 5


def test_too_few_samples(monkeypatch):
    with pytest.raises(UserError, match="--batch-size 48 is more than the 47 samples"):
        sampler_of(monkeypatch, 47, 0, 1, batch_size=48)


def test_steps_of_the_run(monkeypatch):
    """For schedules: they end where the run ends."""
    assert sampler_of(monkeypatch, 200, 0, 1, batch_size=24, epochs=3).total_steps == 24
    assert sampler_of(monkeypatch, 200, 0, 1, batch_size=24, epochs=3, steps=20).total_steps == 20
    assert sampler_of(monkeypatch, 200, 0, 1, batch_size=24, epochs=3, steps=30).total_steps == 24

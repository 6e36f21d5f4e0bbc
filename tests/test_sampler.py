"""The sampler's order is DistributedSampler's, from any step on."""

import argparse
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from common import group
from common.launch import UserError
from common.run import ResumableSampler


def sampler_of(monkeypatch, size, rank, world_size, batch_size, seed=0, accum=1, shuffle="randperm"):
    monkeypatch.setattr(group, "rank", lambda: rank)
    monkeypatch.setattr(group, "world_size", lambda: world_size)
    args = argparse.Namespace(batch_size=batch_size, seed=seed, accum=accum, shuffle=shuffle)
    return ResumableSampler(size, args)


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


@pytest.mark.parametrize("shuffle", ["randperm", "keyed"])
def test_epochs_differ(monkeypatch, shuffle):
    sampler = sampler_of(monkeypatch, 96, 0, 1, batch_size=48, shuffle=shuffle)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
    assert len(set(orders)) == 3 and all(sorted(order) == list(range(96)) for order in orders)


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 5000, 16_385])
def test_keyed_is_a_permutation(monkeypatch, size):
    assert sorted(sampler_of(monkeypatch, size, 0, 1, batch_size=1, shuffle="keyed")) == list(range(size))


def test_keyed_is_random(monkeypatch):
    """Chi-square of where samples come to stand, and of which comes next, over the orders of many epochs."""
    size, epochs = 40, 4000
    sampler = sampler_of(monkeypatch, size, 0, 1, batch_size=1, shuffle="keyed")
    orders = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    orders = torch.tensor(orders)
    places = torch.zeros(size, size)
    steps = torch.zeros(size)
    for order in orders:
        places[torch.arange(size), order] += 1
        steps += torch.bincount((order[1:] - order[:-1]) % size, minlength=size)
    expected = epochs / size
    assert ((places - expected) ** 2 / expected).sum() == pytest.approx((size - 1) ** 2, abs=6 * 1.42 * size)
    expected = epochs  # none of the other samples is nearer than another, the same one does not come again
    assert steps[0] == 0
    assert ((steps[1:] - expected) ** 2 / expected).sum() < size + 6 * (2 * size) ** 0.5


@pytest.mark.parametrize("shuffle", ["randperm", "keyed"])
@pytest.mark.parametrize("world_size, accum", [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)])
def test_each_step_sees_the_same_samples(monkeypatch, world_size, accum, shuffle):
    monkeypatch.setattr(ResumableSampler, "CHUNK", 7)
    whole = list(sampler_of(monkeypatch, 200, 0, 1, batch_size=24, shuffle=shuffle))
    samplers = [
        sampler_of(monkeypatch, 200, rank, world_size, 24, accum=accum, shuffle=shuffle) for rank in range(world_size)
    ]
    loaders = [iter(DataLoader(range(200), sampler.micro_batch, sampler=sampler)) for sampler in samplers]
    for step in range(200 // 24):
        seen = [next(loader).tolist() for loader in loaders for _ in range(accum)]
        assert sorted(itertools.chain(*seen)) == sorted(whole[step * 24 : step * 24 + 24])


@pytest.mark.parametrize("shuffle", ["randperm", "keyed"])
def test_start_within_an_epoch_loads_nothing_before(monkeypatch, shuffle):
    loaded = []

    class Watched(torch.utils.data.Dataset):
        def __getitem__(self, index):
            loaded.append(index)
            return index

    sampler = sampler_of(monkeypatch, 200, 1, 2, batch_size=24, shuffle=shuffle)
    whole = list(sampler)
    sampler.set_epoch(0, step=5)
    batches = list(DataLoader(Watched(), sampler.micro_batch, sampler=sampler))
    assert torch.cat(batches).tolist() == loaded == whole[5 * 12 :]
    assert len(sampler) == len(loaded) and len(batches) == 200 // 24 - 5


def test_too_few_samples(monkeypatch):
    with pytest.raises(UserError, match="--batch-size 48 is more than the 47 samples"):
        sampler_of(monkeypatch, 47, 0, 1, batch_size=48)

"""The input path: what the sampler of an epoch costs, in time and memory, and how fast the loader is alone."""

import itertools
import os
import statistics
import time
from multiprocessing import get_context
from pathlib import Path

from benchmarks.programs import ratios
from common import job, ranks
from common.data import ResumableSampler
from common.options import Options

import torch
from torch.utils.data import DataLoader, DistributedSampler

WORLD_SIZES = (1, 8, 1024)
BATCH = 2**13  # global: all world sizes divide it
KINDS = ("DistributedSampler", "ResumableSampler")


def measure(sizes=(10**6, 10**7, 10**8), rounds=100):
    table = []
    for size, world_size, kind in itertools.product(sizes, WORLD_SIZES, KINDS):
        measured = in_child(first_index, kind, size, world_size)
        table.append({"samples": size, "ranks": world_size, "sampler": kind, **measured})
    return {
        "epoch": table,
        f"middle of an epoch of {sizes[-1]} samples, 8 ranks": in_child(first_index, KINDS[1], sizes[-1], 8, 0.5),
        "loader": in_child(loader_path, rounds),
    }


def in_child(function, *args):
    """What the function returns in a forked process, whose peak of memory is its own."""
    context = get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(function(*args)))
    process.start()
    while not receiving.poll(1):
        if not process.is_alive():
            raise RuntimeError(f"{function.__name__}{args} ended with {process.exitcode}")
    result = receiving.recv()
    process.join()
    return result


def memory(which):
    """MiB of this process: "VmRSS" now, "VmHWM" at most."""
    return int(Path("/proc/self/status").read_text().partition(f"{which}:")[2].split()[0]) / 1024


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def sampler_of(kind, data, rank, world_size):
    if kind == "DistributedSampler":
        return DistributedSampler(data, world_size, rank, drop_last=True)
    ranks.rank, ranks.world_size = lambda: rank, lambda: world_size
    return ResumableSampler(data, Options(__doc__).parse_args(["--batch-size", str(BATCH)]))


def first_index(kind, size, world_size, part=0.0):
    """Seconds to the first index of an epoch, or of the part of it that is left, peak MiB, µs of each index then."""
    torch.set_num_threads(1)
    next(iter(sampler_of(kind, range(2 * BATCH), 0, world_size)))  # what is loaded once is not the sampler's
    sampler = sampler_of(kind, range(size), 0, world_size)
    if part:
        sampler.set_epoch(0, int(part * sampler.steps))
    before = memory("VmRSS")
    reset_peak()
    start = time.perf_counter()
    indices = iter(sampler)
    next(indices)
    seconds = time.perf_counter() - start
    peak, count, start = memory("VmHWM") - before, 0, time.perf_counter()
    for _ in itertools.islice(indices, 500_000):
        count += 1
    each = (time.perf_counter() - start) / max(1, count)
    return {"first index, s": round(seconds, 3), "peak, MiB": round(peak), "each index, µs": round(1e6 * each, 3)}


def loader_path(rounds):
    """Ratios of the time of 100 batches of 96 samples of the job's data, without a model, in one process."""
    torch.set_num_threads(1)
    data = job.load_data()[0]
    endless = torch.utils.data.ConcatDataset([data] * 2000)
    loaders = {}
    for kind in KINDS:
        loaders[kind] = iter(DataLoader(endless, 96, sampler=sampler_of(kind, endless, 0, 1)))
        next(loaders[kind])
    times = {kind: [] for kind in loaders}
    for _ in range(rounds):
        for kind, batches in loaders.items():
            start = time.perf_counter()
            for _ in range(100):
                next(batches)
            times[kind].append((time.perf_counter() - start) / 100)
    found = ratios(times, "DistributedSampler")
    for kind, values in times.items():
        found[kind]["samples/s"] = round(96 / statistics.median(values))
    return found


if not hasattr(os, "fork"):
    raise ImportError("this benchmark forks")

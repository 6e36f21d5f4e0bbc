"""Far more ranks than there are cores: the sampler's arithmetic, torch's fake process group, and a model of the rest.

The fake group takes every collective as done, so that one process runs what one rank of many would compute.
"""

import argparse
import itertools
import statistics
import time
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from benchmarks.models import OTHERS
from benchmarks.sampler import in_child
from benchmarks.workers import run_ranks
from common import group, job
from common.run import EachSecond, ResumableSampler, Run

WORLD_SIZES = (1, 1024, 16_384)

# Of the links of three clusters, in bytes/s per rank and seconds per hop; as stated by who sells them, not measured.
LINKS = {"100 Gbit/s": (12.5e9, 10e-6), "400 Gbit/s": (50e9, 5e-6), "NVLink, 450 GB/s": (450e9, 2e-6)}


def measure(sizes=WORLD_SIZES):
    found = {
        "coverage": [in_child(coverage, size, kind) for size in sizes for kind in ("randperm", "keyed")],
        "per rank": {f"{size} ranks": in_child(one_rank, size) for size in sizes},
        "all-reduce": all_reduce_model(),
    }
    found["predicted efficiency"] = predict()
    return found


def coverage(world_size, kind):
    """How often each sample is in the ranks' shares of an epoch of a few steps and a rest."""
    size, batch = 5 * 4 * world_size + 77, 4 * world_size
    args = argparse.Namespace(batch_size=batch, accum=1, seed=1, shuffle=kind)
    group.world_size = lambda: world_size
    counts, seconds = torch.zeros(size, dtype=torch.int64), []
    for rank in range(world_size):
        group.rank = lambda rank=rank: rank
        start = time.perf_counter()
        share = list(ResumableSampler(size, args))
        seconds.append(time.perf_counter() - start)
        counts += torch.bincount(torch.tensor(share), minlength=size)
    steps = size // batch
    return {
        "ranks": world_size,
        "shuffle": kind,
        "samples": size,
        "seen once": int((counts == 1).sum()),
        "seen more than once": int((counts > 1).sum()),
        "left out": int((counts == 0).sum()),
        "left out, as they do not fill a batch": size - steps * batch,
        "ms per rank": round(1000 * statistics.median(seconds), 3),
    }


def one_rank(world_size):
    """What a step, and what is done once a second, once an epoch or at the end costs one rank of so many."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    warnings.simplefilter("ignore")
    group.check_same = lambda what, value: None  # the others have no values
    model = DDP(OTHERS["wide"](), bucket_cap_mb=5)
    messages = []

    def count(state, bucket):
        messages.append(bucket.buffer().nbytes)
        dist.all_reduce(bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, count)
    args = argparse.Namespace(
        **dict(batch_size=8 * world_size, accum=1, seed=0, shuffle="randperm", snapshot=None, epochs=1, steps=None),
        **dict(device="cpu", precision="fp32", clip=None, log_every=1, metrics=None, tensorboard=None, save_every=None),
    )
    data = job.load_data()[0]
    sampler = ResumableSampler(200 * args.batch_size, args)
    loader = DataLoader(Repeated(data, sampler.size), sampler.micro_batch, sampler=sampler)
    device = torch.device("cpu")
    run = Run(args, model, torch.optim.SGD(model.parameters(), lr=0.01), sampler, device)
    run.train_loader = loader  # the others have no length to compare
    run.epochs().__next__()
    times = []
    for micro_batches in itertools.islice(run.steps(loader), 150):
        start = time.perf_counter()
        run.optimizer.zero_grad()
        for inputs, labels in micro_batches:
            run.backward(job.loss(model(inputs), labels))
        run.step()
        times.append(time.perf_counter() - start)
    per_step = len(messages) / len(times)
    every_second = EachSecond(device)

    def exchange():
        every_second.left = 1
        every_second.most(lambda: [0, 0, 0])

    return {
        "step, ms": round(1000 * statistics.median(times), 3),
        "messages per step": round(per_step, 2),
        "MB per step": round(sum(messages) / len(times) / 1e6, 3),
        "exchange of each second, ms": milliseconds(exchange),
        "row of numbers from all, ms": milliseconds(lambda: group.gather([1.0, 2.0], device)),
        "comparison of weights at the end, ms": milliseconds(lambda: group.check_same_weights(model, device)),
    }


class Repeated(torch.utils.data.Dataset):
    def __init__(self, data, size):
        self.data, self.size = data, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index % len(self.data)]


def milliseconds(function):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 3)


def ring(numbers, ranks, bandwidth, latency):
    """Seconds of a ring all-reduce: each rank sends 2 (ranks - 1) times a share of the bytes, one after the other."""
    return 2 * (ranks - 1) * (numbers / ranks / bandwidth + latency)


def all_reduce_model():
    """Bandwidth and latency from two processes here, and what they predict for three and four, against the measured."""
    sizes = [2**power for power in range(10, 25, 2)]  # bytes
    measured = {
        ranks: dict(zip(sizes, run_ranks("benchmarks.simulation", "all_reduces", *sizes, ranks=ranks), strict=True))
        for ranks in (2, 3, 4)
    }
    latency = measured[2][sizes[0]] / 2
    bandwidth = sizes[-1] / (measured[2][sizes[-1]] - 2 * latency)
    rows = []
    for ranks, times in measured.items():
        for size, seconds in times.items():
            predicted = ring(size, ranks, bandwidth, latency)
            rows.append(
                {
                    "ranks": ranks,
                    "bytes": size,
                    "measured, ms": round(1000 * seconds, 3),
                    "predicted, ms": round(1000 * predicted, 3),
                }
            )
    return {"bandwidth, GB/s": round(bandwidth / 1e9, 3), "latency, µs": round(1e6 * latency, 1), "rows": rows}


def all_reduces(*sizes):
    medians = []
    for size in map(int, sizes):
        values, times = torch.zeros(size // 4), []
        for _ in range(60 if size < 2**22 else 15):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return medians


def predict(parameters=10**9, seconds=0.3):
    """Share of a step that computes, where the all-reduce of fp32 gradients hides behind two thirds of it, backward."""
    rows = []
    for (link, (bandwidth, latency)), ranks in itertools.product(LINKS.items(), (8, 64, 1024, 16_384)):
        communicates = ring(4 * parameters, ranks, bandwidth, latency)
        step = seconds / 3 + max(2 / 3 * seconds, communicates)
        rows.append(
            {
                "link": link,
                "ranks": ranks,
                "all-reduce, ms": round(1000 * communicates, 1),
                "of which latency, ms": round(2000 * (ranks - 1) * latency, 1),
                "efficiency": round(seconds / step, 3),
            }
        )
    return {"parameters": parameters, "seconds of computing": seconds, "rows": rows}

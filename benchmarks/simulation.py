"""Far more ranks than there are cores: the sampler's arithmetic, torch's fake process group, and a model of the rest.

The fake group takes every collective as done, so that one process runs what one rank of many would compute.
"""

import itertools
import statistics
import time
import warnings

from benchmarks.models import OTHERS
from benchmarks.sampler import in_child
from benchmarks.workers import run_ranks
from common import job, ranks
from common.data import ResumableSampler, train_loader
from common.options import Options
from common.ranks import EachSecond
from common.run import Run

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD_SIZES = (1, 1024, 16_384)

# Of the links of three clusters, in bytes/s per rank and seconds per hop; as stated by who sells them, not measured.
LINKS = {"100 Gbit/s": (12.5e9, 10e-6), "400 Gbit/s": (50e9, 5e-6), "NVLink, 450 GB/s": (450e9, 2e-6)}


def measure(sizes=WORLD_SIZES):
    found = {
        "coverage": [in_child(coverage, size) for size in sizes],
        "per rank": {f"{size} ranks": in_child(one_rank, size) for size in sizes},
        "all-reduce": all_reduce_model(),
    }
    found["predicted efficiency"] = predict()
    return found


def coverage(world_size):
    """How often each sample is in the ranks' shares of an epoch of a few steps and a rest."""
    size, batch = 5 * 4 * world_size + 77, 4 * world_size
    args = Options(__doc__).parse_args(["--batch-size", str(batch), "--seed", "1"])
    ranks.world_size = lambda: world_size
    counts, seconds = torch.zeros(size, dtype=torch.int64), []
    for rank in range(world_size):
        ranks.rank = lambda rank=rank: rank
        start = time.perf_counter()
        share = list(ResumableSampler(range(size), args))
        seconds.append(time.perf_counter() - start)
        counts += torch.bincount(torch.tensor(share), minlength=size)
    steps = size // batch
    return {
        "ranks": world_size,
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
    model = OTHERS["wide"]()
    ddp = DDP(model, bucket_cap_mb=5)
    messages = []

    def count(state, bucket):
        messages.append(bucket.buffer().nbytes)
        dist.all_reduce(bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, count)
    words = {"--batch-size": 8 * world_size, "--epochs": 1, "--steps": 150, "--lr": 0.01, "--device": "cpu"}
    args = Options(__doc__).parse_args([str(word) for option in words.items() for word in option])
    device, data = torch.device(args.device), job.load_data()[0]
    loader = train_loader(Repeated(data, 200 * args.batch_size), args, device, job.collate)
    optimizer, schedule = job.make_optimizer(model, args, loader.sampler.total_steps)
    run = Run(args, loader, ddp, model=model, optimizer=optimizer, schedule=schedule)
    messages.clear()  # of the arrangement at the start
    times, start = [], time.perf_counter()
    for inputs, labels in run.batches():
        loss = job.loss(ddp(inputs), labels)
        loss.backward()
        run.record(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        times.append(now - start)
        start = now
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


def ring(numbers, world_size, bandwidth, latency):
    """Seconds of a ring all-reduce: each rank sends 2 (ranks - 1) times a share of the bytes, one after the other."""
    return 2 * (world_size - 1) * (numbers / world_size / bandwidth + latency)


def all_reduce_model():
    """Bandwidth and latency from two processes here, and what they predict for three and four, against the measured."""
    sizes = [2**power for power in range(10, 25, 2)]  # bytes
    measured = {
        count: dict(zip(sizes, run_ranks("benchmarks.simulation", "all_reduces", *sizes, ranks=count), strict=True))
        for count in (2, 3, 4)
    }
    latency = measured[2][sizes[0]] / 2
    bandwidth = sizes[-1] / (measured[2][sizes[-1]] - 2 * latency)
    rows = []
    for count, times in measured.items():
        for size, seconds in times.items():
            predicted = ring(size, count, bandwidth, latency)
            rows.append(
                {
                    "ranks": count,
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
    for (link, (bandwidth, latency)), count in itertools.product(LINKS.items(), (8, 64, 1024, 16_384)):
        communicates = ring(4 * parameters, count, bandwidth, latency)
        step = seconds / 3 + max(2 / 3 * seconds, communicates)
        rows.append(
            {
                "link": link,
                "ranks": count,
                "all-reduce, ms": round(1000 * communicates, 1),
                "of which latency, ms": round(2000 * (count - 1) * latency, 1),
                "efficiency": round(seconds / step, 3),
            }
        )
    return {"parameters": parameters, "seconds of computing": seconds, "rows": rows}

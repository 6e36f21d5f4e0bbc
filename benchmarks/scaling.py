"""One process against two, and against one with two threads, and what the machine allows.

The ceiling is what two processes reach that share nothing but the machine: it tells what two cores are worth here. The
rest of the way is communication, for which an all-reduce of as many bytes as the gradients have is measured alone.
"""

import statistics
import time

from benchmarks.models import BATCHES, OTHERS
from benchmarks.programs import race, spread, torchrun
from benchmarks.workers import run_ranks
from common import job

import torch
import torch.distributed as dist

SIZES = ("default", "wide", "conv", "conv, large batch")
TURNS = {
    "one": ["one"],
    "two": ["two"],
    "threads": ["threads"],
    "weak": ["weak"],
    "halves at once": ["half", "half too"],
    "two at once": ["one", "one too"],
}


def measure(sizes=SIZES, **effort):
    """{size: speed-ups in samples/s over one process of one thread, and the all-reduce}, and what the machine does."""
    found = {"machine": run_ranks("benchmarks.scaling", "machine_rates")}
    for size in sizes:
        batch = BATCHES[size]
        programs = {
            "one": torchrun("ddp_torchrun.py", size, processes=1),
            "one too": torchrun("ddp_torchrun.py", size, processes=1),
            "two": torchrun("ddp_torchrun.py", size),
            "threads": torchrun("ddp_torchrun.py", size, processes=1, threads=2),
            "weak": torchrun("ddp_torchrun.py", size, batch=2 * batch),
            "half": torchrun("ddp_torchrun.py", size, processes=1, batch=batch // 2),
            "half too": torchrun("ddp_torchrun.py", size, processes=1, batch=batch // 2),
        }
        times = race(programs, TURNS, **effort)

        def speed_up(turn, work=1, times=times):
            return [work * one / other for one, other in zip(times["one"], times[turn], strict=True)]

        found[size] = {
            "ms per step of one process": round(1000 * statistics.median(times["one"]), 4),
            "strong": spread(speed_up("two"), "speed-up"),
            "strong, ceiling": spread(speed_up("halves at once"), "speed-up"),
            "weak": spread(speed_up("weak", 2), "speed-up"),
            "weak, ceiling": spread(speed_up("two at once", 2), "speed-up"),
            "one process, two threads": spread(speed_up("threads"), "speed-up"),
            "gradients, MB": round(4 * parameters(size) / 1e6, 3),
            "all-reduce, ms": run_ranks("benchmarks.scaling", "all_reduce_of", size),
        }
    return found


def parameters(size):
    return sum(value.numel() for value in OTHERS.get(size, job.ToyModel)().parameters())


def timed(function, seconds=1.0):
    """The median seconds of a call."""
    times, end = [], time.perf_counter() + seconds
    function()
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine_rates():
    """What one rank reaches while the other waits, and while both work."""
    left = torch.randn(512, 512)
    source, target = torch.randn(2**25), torch.empty(2**25)
    found = {}
    for name, function, per_call in [
        ("matmul, GFLOP/s", lambda: left @ left, 2 * 512**3 / 1e9),
        ("copy, GB/s", lambda: target.copy_(source), 2 * source.nbytes / 1e9),
    ]:
        dist.barrier()
        if dist.get_rank() == 0:
            found[f"{name}, one process"] = round(per_call / timed(function), 1)
        dist.barrier()
        found[f"{name}, each of two"] = round(per_call / timed(function), 1)
    return found


def all_reduce_of(size):
    """Milliseconds of an all-reduce of the model's gradients."""
    gradients = torch.zeros(parameters(size))
    times = []
    for _ in range(100):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradients)
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 3)

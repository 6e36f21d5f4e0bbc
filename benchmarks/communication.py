"""What DDP's knobs bring: the same steps in one process group, each variant with a model of its own, in turns."""

import time
from contextlib import nullcontext

from benchmarks.models import BATCHES, OTHERS
from benchmarks.programs import ratios
from benchmarks.sampler import memory
from benchmarks.workers import run_ranks
from common import job

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

VARIANTS = {
    "plain": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "both": {"gradient_as_bucket_view": True, "static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "buckets of 1 MB": {"bucket_cap_mb": 1},
    "buckets of 5 MB": {"bucket_cap_mb": 5},
    "buckets of 100 MB": {"bucket_cap_mb": 100},
    "foreach optimizer": {"optimizer": {"foreach": True}},
    "fused optimizer": {"optimizer": {"fused": True}},
    "accum 4, each communicates": {"accum": 4, "sync": True},
    "accum 4, no_sync": {"accum": 4},
}


def measure(sizes=("default", "wide", "conv"), rounds=100, seconds=0.06):
    """{size: {variant: ms per step, ratio to plain DDP, quartiles}}, with two processes of one thread; and memory."""
    found = {size: run_ranks("benchmarks.communication", "compare", size, rounds, seconds) for size in sizes}
    for name in ("plain", "gradient_as_bucket_view"):
        peak = run_ranks("benchmarks.communication", "peak_memory", name)
        found.setdefault("peak memory of 40 MB of parameters, MiB", {})[name] = peak
    return found


def compare(size, rounds, seconds):
    steps = {name: stepper(size, **options) for name, options in VARIANTS.items()}
    for step in steps.values():
        for _ in range(5):
            step()
    start = time.perf_counter()
    for _ in range(10):
        steps["plain"]()
    count = torch.tensor(max(2, round(10 * float(seconds) / (time.perf_counter() - start))))
    dist.broadcast(count, 0)
    times = {name: [] for name in steps}
    for number in range(int(rounds)):
        order = list(steps)
        first = number % len(order)
        for name in order[first:] + order[:first]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                steps[name]()
            times[name].append((time.perf_counter() - start) / count.item())
    return ratios(times, "plain")


def peak_memory(name):
    """MiB by which a model of 10 million parameters, its gradients, buckets and momenta raise the peak."""
    before = memory("VmRSS")
    net = DDP(nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(10))), **VARIANTS[name])
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        net(torch.rand(8, 1000)).sum().backward()
        sgd.step()
    return round(memory("VmHWM") - before)


def stepper(size, accum=1, sync=False, optimizer=None, **options):
    """A function that takes one optimizer step over the share of a global batch."""
    torch.manual_seed(0)
    share = BATCHES[size] // dist.get_world_size()
    inputs, labels = torch.rand(share, 64), torch.randint(10, (share,))
    net = DDP(OTHERS.get(size, job.ToyModel)(), **options)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, **(optimizer or {}))
    micro_batches = list(zip(inputs.chunk(accum), labels.chunk(accum), strict=True))

    def step():
        sgd.zero_grad()
        for number, (values, digits) in enumerate(micro_batches, 1):
            with nullcontext() if sync or number == accum else net.no_sync():
                (cross_entropy(net(values), digits) / accum).backward()
        sgd.step()

    return step

"""Do the machines work together? Join, show each rank, test an all-reduce, measure it. See ddp_multinode.sh --check."""

import os
import time

from common import group, launchers, meeting, ranks
from common.errors import RunError, entry, process
from common.options import Options

import torch
import torch.distributed as dist

SIZES = (8, 2**12, 2**16, 2**20, 2**24)  # bytes


@entry
def main():
    args = Options(__doc__, ddp=True, launched=True).parse_args()
    here = launchers.ranks_from_environment(args)
    device = group.join(args, here)
    doing = "the exchange of names"
    try:
        show(here, device)
        for size in SIZES:
            doing = f"an all-reduce of {size:,} bytes"
            test(size, device)
            measure(size, device)
    except RuntimeError as error:
        # A collective tells only that somebody failed: the store tells who does not answer any more. Others may still
        # wait in the collective, until its time is over.
        if process.watch:
            meeting.exchange(process.watch.store, "after an error", here, {}, args.timeout + 5)
        raise RunError(f"{doing} fails, though all ranks answer: {error}") from None
    ranks.say("all is well: the sums are right on all ranks")


def show(here, device):
    """Print a table of the ranks."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    backend = dist.get_backend()
    if backend == "nccl":
        backend += " " + ".".join(map(str, torch.cuda.nccl.version()))
    row = (here.rank, ranks.this_machine(), here.local_rank, process.address, os.environ.get("GLOO_SOCKET_IFNAME", "?"))
    rows = [("rank", "machine", "local rank", "address", "interface", "device", "torch", "backend")]
    rows += ranks.gather_objects((*row, f"{device} {name}".strip(), torch.__version__, backend))
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        ranks.say("  ".join(f"{cell!s:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def test(size, device):
    """Raise `RunError` where a rank gets a wrong sum from an all-reduce of `size` bytes."""
    numbers, world_size = torch.arange(size // 8, device=device), ranks.world_size()
    right = torch.equal(ranks.total(numbers * (ranks.rank() + 1)), numbers * (world_size * (world_size + 1) // 2))
    answers = ranks.gather_objects((right, f"rank {ranks.rank()} at {ranks.this_machine()}"))
    if wrong := [name for right, name in answers if not right]:
        raise RunError(f"an all-reduce of {size:,} bytes gives a wrong sum on {', '.join(wrong)}")


def measure(size, device):
    """Print how long an all-reduce of `size` bytes takes, the median of several, on the slowest rank."""
    tensor, times = torch.zeros(size // 4, device=device), []
    for _ in range(3 + (20 if size < 2**24 else 5)):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    seconds = max(ranks.gather_objects(sorted(times[3:])[len(times[3:]) // 2]))
    moved = 2 * (ranks.world_size() - 1) / ranks.world_size() * size  # bytes that each rank sends in a ring
    ranks.say(f"all-reduce of {size:,} bytes: {seconds * 1e6:,.0f} µs, {moved / seconds / 1e6:,.1f} MB/s per rank")


if __name__ == "__main__":
    main()

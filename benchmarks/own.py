"""What the kit itself does in a step and in an epoch, without a model: `Run` around a loop that only records losses."""

import itertools
import statistics
import sys
import time

from benchmarks.workers import run_ranks

import torch

STEPS = 14  # of an epoch, as in the default job


def measure(epochs=500):
    """{ranks: {"step": µs, "epoch": µs beside its steps}}, medians."""
    return {ranks: run_ranks("benchmarks.own", "loop", epochs, ranks=ranks) for ranks in (1, 2)}


class Loader:
    """The batches of a `train_loader`, without what loading them takes."""

    num_workers, collate_fn = 0, None

    def __init__(self, loader):
        self.sampler, self.batches = loader.sampler, [next(iter(loader))] * STEPS

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def loop(epochs):
    from common import job
    from common.data import train_loader
    from common.options import Options
    from common.run import Run

    args = Options("").parse_args(["--epochs", str(epochs), "--device", "cpu"])
    torch.manual_seed(0)  # the ranks' weights are compared in the end
    device, model, loss = torch.device("cpu"), job.ToyModel(), torch.tensor(1.0)
    loader = Loader(train_loader(job.load_data()[0], args, device))
    run, steps, starts = Run(args, loader, model, model=model), [], []
    sys.stdout = sys.stderr  # standard output is for the results
    for _ in run.epochs():
        starts.append(time.perf_counter())
        times = []
        for _ in run.batches():
            run.record(loss)
            times.append(time.perf_counter())
        steps += [end - start for start, end in itertools.pairwise(times)]
    between = [end - start for start, end in itertools.pairwise(starts)]
    step, epoch = statistics.median(steps), statistics.median(between)
    return {"step": round(step * 1e6, 1), "epoch": round((epoch - STEPS * step) * 1e6)}

"""How long a step stands still for a snapshot, against `torch.save` and fsync alone, and the memory at its peak."""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.models import ConvModel
from benchmarks.sampler import in_child, memory, reset_peak
from common.options import Options
from common.snapshot import Snapshots

import torch
from torch import nn


def measure(sizes=(10**6, 10**7, 10**8), runs=7):
    return {f"{size} parameters": in_child(compare, size, runs) for size in sizes}


def compare(size, runs):
    """Seconds, medians of runs in turns; the model is trained by SGD with momentum, which doubles what is saved."""
    torch.set_num_threads(1)
    layers = [nn.Linear(size // 10000, 1000, bias=False) for _ in range(10)]
    model = nn.ModuleList(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    directory = Path(tempfile.mkdtemp(prefix="bench-"))
    args = Options(__doc__).parse_args(["--snapshot", str(directory / "run.pt")])
    snapshots = Snapshots(args, {"model": model, "optimizer": optimizer}, model, 1)
    conv = ConvModel()
    images = torch.rand(48, 64)

    def bare():
        with (directory / "bare.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def step():
        conv(images).sum().backward()

    def timed(function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    found = {"torch.save + fsync": [], "pause": [], "until written": [], "steps meanwhile": []}
    peaks, number = {"torch.save + fsync": [], "snapshot": []}, 0
    for number in range(runs + 1):
        before = memory("VmRSS")
        reset_peak()
        seconds = timed(bare)
        peaks["torch.save + fsync"].append(memory("VmHWM") - before)
        alone = statistics.median(timed(step) for _ in range(20))
        before = memory("VmRSS")
        reset_peak()
        start = time.perf_counter()
        pause = timed(lambda number=number: snapshots.save({"step_count": number}))
        meanwhile = []
        while not snapshots.writing.done():
            meanwhile.append(timed(step))
        snapshots.finish()
        peaks["snapshot"].append(memory("VmHWM") - before)
        if number:  # the first warms up
            found["torch.save + fsync"].append(seconds)
            found["pause"].append(pause)
            found["until written"].append(time.perf_counter() - start)
            found["steps meanwhile"].append(statistics.median(meanwhile or [alone]) / alone)
    shutil.rmtree(directory)
    medians = {f"{name}, s": round(statistics.median(values), 4) for name, values in found.items()}
    medians["a step while it is written, ratio"] = medians.pop("steps meanwhile, s")
    ratio = [pause / bare for pause, bare in zip(found["pause"], found["torch.save + fsync"], strict=True)]
    medians["pause / (torch.save + fsync)"] = round(statistics.median(ratio), 3)
    return medians | {f"peak of {name}, MiB": round(max(values[1:])) for name, values in peaks.items()}

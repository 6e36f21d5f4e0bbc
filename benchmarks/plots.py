"""The README's pictures, in greys and colours that are legible on white and on black; they have no background."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
GREY, COLOURS = "#7d8590", ("#3b8eea", "#4bb3c4", "#e0823d", "#3fa35a", "#b76be0", "#d1527a", "#8a8f98")
pyplot.rcParams.update(
    {name: GREY for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}
    | {"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.family": "sans-serif", "font.size": 10}
    | {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
)

PATTERNS = {
    "dp_train": ["python", "dp_train.py"],
    "ddp_spawn, 2 processes": ["python", "ddp_spawn.py", "--nprocs", "2"],
    "ddp_torchrun, 3 processes": ["torchrun", "--nproc_per_node=3", "ddp_torchrun.py"],
    "ddp_multinode, 2 machines": ["bash", "ddp_multinode.sh", "--simulate", "2", "--", "ddp_torchrun.py"],
    "model_parallel_ddp, 2 processes": ["python", "model_parallel_ddp.py", "--nprocs", "2"],
}


def losses():
    """{pattern: [loss of each step]} of the default job."""
    found = {}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        for number, (name, command) in enumerate(PATTERNS.items()):
            metrics = Path(directory, f"{number}.jsonl")
            command = [*command, "--device", "cpu", "--metrics", str(metrics)]
            subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, check=True, capture_output=True)
            events = [json.loads(line) for line in metrics.read_text().splitlines()]
            found[name] = [event["loss"] for event in events if event["event"] == "step"]
    return found


def save(figure, name):
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / f"{name}.svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def draw_losses(curves):
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    # Each later line is thinner, so that those that lie below it show.
    for number, (name, values) in enumerate(curves.items()):
        axes.plot(range(1, len(values) + 1), values, label=name, color=COLOURS[number], lw=9 - 1.9 * number)
    axes.set(xlabel="step", ylabel="loss over the global batch", yscale="log")
    axes.legend()
    save(figure, "losses")


def draw_bars(groups, name, label, line, values):
    """groups: {size: {bar: result}}; values(result): (height, (low, high))."""
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    bars = list(dict.fromkeys(bar for group in groups.values() for bar in group))
    for number, bar in enumerate(bars):
        for place, group in enumerate(groups.values()):
            if bar not in group:
                continue
            height, (low, high) = values(group[bar])
            width = 0.8 / len(bars)
            axes.bar(
                place + (number - (len(bars) - 1) / 2) * width,
                height,
                0.9 * width,
                yerr=[[height - low], [high - height]],
                color=COLOURS[number],
                ecolor=GREY,
                label=bar if place == list(groups).index(next(k for k, g in groups.items() if bar in g)) else None,
            )
    axes.axhline(line, color=GREY, lw=1, ls="--")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(label)
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    save(figure, name)


def draw(results):
    if "losses" in results:
        draw_losses(results["losses"])
    if "steps" in results:
        draw_bars(
            results["steps"],
            "steps",
            "time of a step / bare DDP loop",
            1,
            lambda result: (result["ratio"], result["quartiles"]),
        )
    if "scaling" in results:
        names = ("strong", "weak", "one process, two threads", "strong, ceiling", "weak, ceiling")
        groups = {
            size: {name: result[name] for name in names}
            for size, result in results["scaling"].items()
            if size != "machine"
        }
        draw_bars(
            groups, "scaling", "samples/s / one process", 2, lambda result: (result["speed-up"], result["quartiles"])
        )

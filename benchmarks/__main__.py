"""Runs the benchmarks and writes results.json and the pictures beside this file.

python -m benchmarks                    # all, in about half an hour on two cores that do nothing else
python -m benchmarks steps startup      # some; the others' results stay as they are
python -m benchmarks --quick            # all with the least effort, to see that they run; writes nothing
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import communication, own, plots, sampler, scaling, simulation, snapshots, startup, steps, store, wall

import torch

RESULTS = Path(__file__).parent / "results.json"
MEASURE = {
    "steps": steps.measure,
    "own": own.measure,
    "scaling": scaling.measure,
    "communication": communication.measure,
    "startup": startup.measure,
    "wall": wall.measure,
    "sampler": sampler.measure,
    "snapshots": snapshots.measure,
    "simulation": simulation.measure,
    "store": store.measure,
    "losses": plots.losses,
}
QUICK = {
    "steps": {"sizes": ("default",), "starts": 1, "rounds": 2, "seconds": 0.01},
    "own": {"epochs": 20},
    "scaling": {"sizes": ("default",), "starts": 1, "rounds": 2, "seconds": 0.01},
    "communication": {"sizes": ("default",), "rounds": 2, "seconds": 0.01},
    "startup": {"runs": 2},
    "wall": {"runs": 2},
    "sampler": {"sizes": (10**5,), "rounds": 2},
    "snapshots": {"sizes": (10**5,), "runs": 2},
    "simulation": {"sizes": (1, 16)},
    "store": {"sizes": (16,)},
    "losses": {},
}


def machine():
    """Where this runs, in general words."""
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return (
        f"{len(os.sched_getaffinity(0))} CPU cores, {memory} GiB memory, {gpus or 'no'} GPU, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def commit():
    """The commit of the code, with "changed" where a file differs from it."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True).stdout

    changed = git("status", "--porcelain", "--", ".", ":!results.json", ":!*.svg", ":(top)*.py", ":(top)common")
    return git("rev-parse", "--short", "HEAD").strip() + " changed" * bool(changed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASURE))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.names) - MEASURE.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(MEASURE)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() and not args.quick else {}
    for name in args.names or MEASURE:
        start = time.monotonic()
        results[name] = MEASURE[name](**QUICK[name] if args.quick else {})
        results.setdefault("machines", {})[name] = machine()
        results.setdefault("commits", {})[name] = commit()
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if not args.quick:
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if args.quick:
        print(json.dumps(results))
    else:
        plots.draw(results)


if __name__ == "__main__":
    main()

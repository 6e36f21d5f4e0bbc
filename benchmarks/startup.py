"""From the command to the first finished step: the kit's scripts against the bare one, under the same launcher."""

import statistics

from benchmarks.programs import spawn, spread, started, torchrun

PHASES = ("process", "imports", "joining", "data", "DDP", "first step")


def measure(runs=12):
    """{launcher: {"kit", "bare": seconds in all and of each phase, "ratio": …}}, medians of runs in turns."""
    programs = {
        ("torchrun", "bare"): torchrun("bare.py", "default"),
        ("torchrun", "kit"): torchrun("ddp_torchrun.py", "default"),
        ("mp.spawn", "bare"): spawn("bare.py", "default"),
        ("mp.spawn", "kit"): spawn("ddp_spawn.py", "default"),
    }
    ends = {key: [] for key in programs}
    for number in range(runs):
        for key in list(programs) if number % 2 else reversed(programs):
            with started({"one": programs[key]}):
                # Seconds from the command to the end of each phase, on the rank that comes last.
                ends[key].append(
                    [max(stamps[phase] for stamps in programs[key].stamps) - programs[key].started for phase in PHASES]
                )
    found = {}
    for launcher in ("torchrun", "mp.spawn"):
        found[launcher] = {}
        for name in ("bare", "kit"):
            medians = [statistics.median(times) for times in zip(*ends[launcher, name], strict=True)]
            phases = [end - begin for begin, end in zip([0, *medians[:-1]], medians, strict=True)]
            found[launcher][name] = {phase: round(seconds, 3) for phase, seconds in zip(PHASES, phases, strict=True)}
            found[launcher][name]["in all"] = round(medians[-1], 3)
        pairs = zip(ends[launcher, "kit"], ends[launcher, "bare"], strict=True)
        found[launcher] |= spread([kit[-1] / bare[-1] for kit, bare in pairs], "ratio")
    return found

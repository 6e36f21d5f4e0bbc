"""Where the time of the bare command goes: `python ddp_spawn.py` from its start to its end, beside the bare loop."""

import statistics
import time

from benchmarks.programs import spawn, spread, started
from benchmarks.startup import PHASES

EPOCHS, STEPS = 20, 280  # of the default job


def measure(runs=8):
    """{program: seconds in all and of each phase, and a rank's peak memory in MiB, "ratio": …}, medians.

    "training" ends with the last step, "ending" with the process; the last evaluation lies between.
    """
    programs = {"bare": spawn("bare.py", "epochs", EPOCHS), "kit": spawn("ddp_spawn.py", "epochs", EPOCHS)}
    phases = (*PHASES, "training", "ending")
    times, memory = {name: [] for name in programs}, {name: [] for name in programs}
    for number in range(runs):
        for name in list(programs) if number % 2 else reversed(programs):
            program = programs[name]
            with started({"one": program}):
                ends = [max(stamps[phase] for stamps in program.stamps) for phase in PHASES]
                program.let_go(STEPS - 1)
                memory[name].append(program.wait()[2])
                ends.append(time.time())
                program.let_go(10**9)
                program.process.wait()
                ends.append(time.time())
            times[name].append([end - program.started for end in ends])
    found = {}
    for name in programs:
        medians = [statistics.median(each) for each in zip(*times[name], strict=True)]
        lengths = [end - begin for begin, end in zip([0, *medians[:-1]], medians, strict=True)]
        found[name] = {phase: round(seconds, 3) for phase, seconds in zip(phases, lengths, strict=True)}
        found[name] |= {"in all": round(medians[-1], 3), "peak memory": round(statistics.median(memory[name]))}
    pairs = zip(times["kit"], times["bare"], strict=True)
    return found | spread([kit[-1] / bare[-1] for kit, bare in pairs], "ratio")

"""The time of a training step: the kit's scripts against a bare loop, the tutorial's, Accelerate and Fabric."""

from benchmarks.programs import race, ratios, spawn, torchrun


def measure(sizes=("default", "wide", "conv", "epochs"), **effort):
    """{size: {program: its ms per step, ratio to the bare loop, quartiles}}, all with two processes of one thread.

    The pauses between turns make the kit exchange its signs of life, one a second, six times as often per step as in a
    run of its own, which is to its disadvantage.
    """
    found = {}
    for size in sizes:
        programs = {
            "bare": torchrun("bare.py", size),
            "bare, mp.spawn": spawn("bare.py", size),
            "ddp_torchrun": torchrun("ddp_torchrun.py", size),
            "ddp_spawn": spawn("ddp_spawn.py", size),
            "accelerate": torchrun("with_accelerate.py", size),
            "fabric": torchrun("with_fabric.py", size),
        }
        if size != "epochs":  # it does not evaluate
            programs["tutorial"] = torchrun("tutorial.py", size)
        found[size] = ratios(race(programs, **effort), "bare")
    return found

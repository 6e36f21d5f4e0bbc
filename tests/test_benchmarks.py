"""The benchmarks run, and compare programs that do the same; no test asserts a time."""

import json
import subprocess
import sys

import pytest
from harness import PYTHON, ROOT

pytest.importorskip("accelerate", reason="benchmarks/requirements.txt is not installed")
pytest.importorskip("lightning_fabric", reason="benchmarks/requirements.txt is not installed")
pytest.importorskip("matplotlib", reason="benchmarks/requirements.txt is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc"),
]


def quick(name):
    command = [PYTHON, "-m", "benchmarks", "--quick", name]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)[name]


def test_programs_compared_take_the_same_steps():
    """But for Accelerate and Fabric, which shuffle otherwise."""
    from benchmarks.programs import spawn, started, torchrun

    programs = {
        "bare": torchrun("bare.py", "default"),
        "bare spawn": spawn("bare.py", "default"),
        "tutorial": torchrun("tutorial.py", "default"),
        "torchrun": torchrun("ddp_torchrun.py", "default"),
        "spawn": spawn("ddp_spawn.py", "default"),
    }
    weights = {}
    with started(programs):
        for name, program in programs.items():
            program.let_go(30)
            weights[name] = program.wait()[1]
    assert len(set(weights.values())) == 1, weights


def test_peers_take_steps():
    programs = quick("steps")["default"]
    assert set(programs) == {"bare", "bare, mp.spawn", "ddp_torchrun", "ddp_spawn", "tutorial", "accelerate", "fabric"}
    assert programs["bare"]["ratio"] == 1 and all(program["ms"] > 0 for program in programs.values())


def test_simulated_ranks_see_each_sample_once():
    found = quick("simulation")
    for row in found["coverage"]:
        assert row["seen more than once"] == 0
        assert row["seen once"] == row["samples"] - row["left out"]
        assert row["left out"] == row["left out, as they do not fill a batch"] == 77 % (4 * row["ranks"])
    sent = [ranks["MB per step"] for ranks in found["per rank"].values()]
    assert len(set(sent)) == 1 and sent[0] == pytest.approx(4 * 2_186_250 / 1e6, abs=0.1)


@pytest.mark.parametrize("name", ["communication", "own", "wall", "sampler", "snapshots", "store", "losses"])
def test_benchmark_runs(name):
    found = quick(name)
    if name == "losses":
        curves = list(found.values())
        assert len(curves) == 5 and all(len(curve) == 280 for curve in curves)
        assert all(curve == pytest.approx(curves[0], rel=1e-3, abs=1e-4) for curve in curves)
    else:
        assert found

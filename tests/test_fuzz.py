"""Random arguments, environments, snapshots and data: never a traceback, a hang or a changed file."""

import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from harness import files, forked

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow
# Set it for more: HOW_MANY=5000 pytest -m slow tests/test_fuzz.py
fuzz = settings(
    max_examples=int(os.environ.get("HOW_MANY", 25)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.generate],  # a failure is small as it is, and a run takes long
)


def run(kit, script, *options, env=None, cwd=None, limit=60):
    """Run to the end, and assert what holds for any run."""
    result = kit.start(*forked(kit.path / script, *options), env=env, cwd=cwd).result(limit)
    lines = [line for line in result.err.splitlines() if "UserWarning" not in line]
    assert result.status in (0, 1, 2) and "Traceback" not in result.err and not result.processes, result
    if result.status:
        assert [line[:7] for line in lines if not line.startswith("waiting for ")] == ["error: "], result
    return result


WORDS = st.one_of(
    st.integers(-3, 200).map(str),
    st.sampled_from(["0", "1", "96", "-1", "1e3", "1e400", "nan", "inf", "4294967297", "9" * 20, "0x10", "1_0", "٣"]),
    st.sampled_from(["", " ", "auto", "cpu", "cuda", "cuda:0", "mps", "gloo", "nccl", "mpi", "fp32", "fp64", "bf16"]),
    st.sampled_from(["env://", "tcp://localhost:1", "tcp://[::1]:0", "tcp://x:99999", "file:///", "file:///no/dir/x"]),
    st.sampled_from(["0,0", "0,1", ",", "-", "--", "--help", "\udcff", "a" * 300, "%s", "{}", "\n"]),
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=8),
)
PATHS = ["new", "new/x", "text", "directory", "link", "dangling", "empty", "metrics", "text/x", "new.prev", "new.tmp"]
PATHS += [".", "/dev/null", "/dev/full", "x" * 300, "\udcff"]
NAMED = ["--snapshot", "--metrics", "--tensorboard"]
OPTIONS = ["--epochs", "--batch-size", "--lr", "--seed", "--device", "--precision", "--accum", "--clip", "--threads"]
OPTIONS += ["--save-every", "--timeout", "--log-every", "--backend", "--init-method", "--local-rank", "--device-ids"]
OPTIONS += ["--output-device", "--nprocs"]
OPTION = st.one_of(
    st.tuples(st.sampled_from(OPTIONS), WORDS),
    st.tuples(st.sampled_from(NAMED), st.sampled_from(PATHS)),
    st.tuples(st.sampled_from(NAMED), WORDS),
    WORDS.map(lambda word: (word,)),
)


@fuzz
@given(
    script=st.sampled_from(["dp_train.py", "ddp_torchrun.py"]),
    options=st.lists(OPTION, max_size=4).map(lambda options: [word for option in options for word in option]),
)
def test_arguments(kit, script, options):
    with tempfile.TemporaryDirectory(dir=kit.path.parent) as directory:
        place = Path(directory)
        (place / "text").write_text("not of this kit")
        (place / "metrics").write_text('{"event": "end"}\n')
        (place / "empty").touch()
        (place / "directory").mkdir()
        (place / "link").symlink_to("text")
        (place / "dangling").symlink_to("nowhere")
        code, before = files(kit.path), files(place)
        result = run(kit, script, *options, "--steps", "1", "--timeout", "2", cwd=place)
        assert files(kit.path) == code
        after = files(place)
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        assert not changed or result.status == 0, (changed, result)
        assert not changed & {"text", "link"}
        if "metrics" in changed:
            assert (place / "metrics").read_text().startswith('{"event": "end"}\n{')


NUMBERS = st.sampled_from(["", "0", "1", "2", "3", "-1", "x", "1e3", "70000", " 1", "99999999999"])
HOSTS = st.sampled_from(["", "127.0.0.1", "localhost", "::1", "nowhere.invalid", "a b", "256.0.0.1"])
NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "GROUP_RANK", "SLURM_PROCID"]
NAMES += ["SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"]
NAMES += [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]


@fuzz
@given(
    env=st.dictionaries(st.sampled_from(NAMES), NUMBERS, max_size=6),
    master=st.dictionaries(st.just("MASTER_ADDR"), HOSTS),
)
def test_environment(kit, env, master):
    if "SLURM_LOCALID" in env:
        env["SLURM_LOCALID"] = "0"  # the others let this one speak
    before = files(kit.path)
    run(kit, "ddp_torchrun.py", "--steps", "1", "--timeout", "1", env=env | master)
    assert files(kit.path) == before


# What happens to some bytes: (what, place, size or bytes), the place and the size as a share of the whole.
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "insert", "zero", "swap"]),
        st.floats(0, 1),
        st.integers(1, 64),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data, mutations):
    data = bytearray(data)
    for what, place, size, some in mutations:
        at = int(place * len(data))
        if what == "flip" and data:
            data[min(at, len(data) - 1)] ^= some[0] or 1
        elif what == "cut":
            del data[at:]
        elif what == "drop":
            del data[at : at + size]
        elif what == "insert":
            data[at:at] = some
        elif what == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif what == "swap":
            data[at:] = data[at + size :] + data[at : at + size]
    return bytes(data)


@fuzz
@given(mutations=MUTATIONS)
def test_snapshots(kit, mutations):
    whole, path, metrics = kit.path / "whole.pt", kit.path / "run.pt", kit.path / "metrics.jsonl"
    options = ("--steps", "2", "--metrics", "metrics.jsonl", "--snapshot")
    if not whole.exists():
        assert run(kit, "dp_train.py", *options, "whole.pt").status == 0
    mutated = mutate(whole.read_bytes(), mutations)
    path.write_bytes(mutated)
    before = metrics.read_text()
    result = run(kit, "dp_train.py", *options, "run.pt")
    assert path.read_bytes() == mutated
    if result.status == 0:  # what was changed says nothing, such as the time of a file in it
        first, *_, last = [json.loads(line) for line in metrics.read_text().splitlines() if '"end"' in line]
        assert first["weights_sha256"] == last["weights_sha256"]
    else:
        assert result.status == 2 and "--snapshot run.pt" in result.err
        assert metrics.read_text() == before


@fuzz
@given(mutations=MUTATIONS, packed=st.booleans())
def test_data(kit, mutations, packed):
    path, good = kit.path / "data" / "digits.csv.gz", kit.path / "good.gz"
    if not good.exists():
        shutil.copy(path, good)
    data = good.read_bytes()
    path.write_bytes(mutate(data, mutations) if packed else gzip.compress(mutate(gzip.decompress(data), mutations), 1))
    before = files(kit.path)
    result = run(kit, "dp_train.py", "--steps", "1")
    assert files(kit.path) == before
    if result.status:
        assert result.status == 2 and ("digits.csv.gz" in result.err or "--batch-size" in result.err), result


def test_a_hang_is_seen(kit):
    (kit.path / "hangs.py").write_text("import time\ntime.sleep(100)\n")
    with pytest.raises(AssertionError, match="still running after 1 s"):
        run(kit, "hangs.py", limit=1)

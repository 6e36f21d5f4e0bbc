"""Nothing lost: a run that was killed or stopped, and started again, ends as if nothing had happened."""

import contextlib
import os
import pickle
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from harness import forked, forked_ranks, free_port, torchrun
from torch.utils.data import DistributedSampler

SNAPSHOT = ("--snapshot", "run.pt")
ALONE = forked("ddp_torchrun.py")
PARALLEL = forked("dp_train.py")
SPAWN = forked("ddp_spawn.py")
PAIRS = forked("model_parallel_ddp.py")
RANKS = forked_ranks(2, "ddp_torchrun.py")
TORCHRUN = torchrun(2, "ddp_torchrun.py")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def load(kit, name="run.pt"):
    return torch.load(kit.path / name, weights_only=True)


def digest(kit, *command, timeout=120):
    """Run to the end; the digest of the weights then."""
    result = kit.run(*command, "--metrics", "metrics.jsonl", timeout=timeout)
    assert result.status == 0, result
    return kit.metrics(event="end")[-1]["weights_sha256"]


def ranks_of(kit, run):
    """Process numbers of the ranks that a launcher started."""
    ranks = []
    for pid, line in kit.processes():
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == run.pid and "resource_tracker" not in line:
            ranks.append(pid)
    return ranks


def remove_temporary_files(kit):
    """What a process that got SIGKILL could not remove itself."""
    for path in kit.temporary.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def harden(kit):
    """A model that is harder to resume: dropout draws random numbers, batch normalization keeps running means."""
    kit.edit("common/job.py", "nn.ReLU()", "nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(64))")


def kill_in_forward(kit, call, who="os.environ['RANK'] == '1'", when="not os.path.exists('killed')"):
    """Let the rank that is `who` mark the file `killed` and die by SIGKILL in that forward call, if `when`.

    It waits before until the snapshot is written that a step before has begun.
    """
    kit.edit(
        "common/job.py",
        "        self.net2 = nn.Linear(64, 10)\n",
        "        self.net2 = nn.Linear(64, 10)\n        self.register_forward_pre_hook(die)\n",
    )
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(
            "\n\ndef die(model, _, calls=[]):\n    import os, time\n    calls.append(1)\n"
            f"    if len(calls) == {call} and {who} and {when}:\n"
            "        time.sleep(0.5)\n        while os.path.exists('run.pt.tmp'): time.sleep(0.01)\n"
            "        open('killed', 'a').write('x')\n        os.kill(os.getpid(), 9)\n"
        )


# ---------------------------------------------------------------------------------------------- exact resume


@pytest.mark.parametrize(
    "command, options, call",
    [
        (forked_ranks(3, "ddp_torchrun.py"), ("--accum", "2"), 85),
        (ALONE, ("--workers", "2"), 30),
        (PARALLEL, ("--accum", "2"), 50),
        pytest.param(SPAWN, (), 30, marks=pytest.mark.versions),
        slow((*PAIRS, "--nprocs", "3"), ("--precision", "bf16", "--clip", "1"), 26),
        slow(TORCHRUN, (), 30),
    ],
    ids=["W3", "alone", "dp", "spawn", "pairs-W3-bf16", "torchrun"],
)
def test_killed_in_the_middle_of_an_epoch(kit, command, options, call):
    harden(kit)
    kill_in_forward(kit, call, who="os.environ.get('RANK') in (None, '1')")
    command = (*command, "--epochs", "3", *options)
    (kit.path / "killed").touch()
    undisturbed = digest(kit, *command)
    (kit.path / "killed").unlink()
    result = kit.start(*command, *SNAPSHOT, "--save-every", "4").result(120)
    assert result.status != 0 and not result.processes
    remove_temporary_files(kit)
    saved = load(kit)["run"]["position"]
    assert saved["step_count"] % 4 == 0 and saved["step"] not in (0, 14)
    assert digest(kit, *command, *SNAPSHOT, "--save-every", "4") == undisturbed


def test_only_the_remaining_samples_are_loaded(kit):
    """Each once, also with another number of processes."""
    kit.edit("common/job.py", "return TensorDataset(pixels[~in_test]", "return Told(pixels[~in_test]")
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(
            "\n\nclass Told(TensorDataset):\n    def __getitem__(self, index):\n"
            "        open('loaded', 'a').write(f'{index}\\n')\n        return super().__getitem__(index)\n"
        )
    kit.run(*PARALLEL, *SNAPSHOT, "--steps", "17")
    (kit.path / "loaded").unlink()
    result = kit.run(*forked_ranks(3, "ddp_torchrun.py"), *SNAPSHOT, "--epochs", "2")
    assert "goes on from run.pt after step 3/14 of epoch 2, 17 in all" in result.out
    loaded = [int(line) for line in (kit.path / "loaded").read_text().split()]
    order = DistributedSampler(range(1438), 1, 0, seed=0, drop_last=True)
    order.set_epoch(1)
    assert sorted(loaded) == sorted(list(order)[3 * 96 : 14 * 96])


@pytest.mark.parametrize(
    "first, then",
    [
        slow(PARALLEL, (*PAIRS, "--nprocs", "2")),
        slow(RANKS, forked_ranks(4, "ddp_torchrun.py")),
        slow(forked_ranks(3, "ddp_torchrun.py"), ALONE),
        slow(RANKS, PARALLEL),
    ],
    ids=["dp-pairs", "2-4", "3-1", "2-dp"],
)
def test_at_another_size(kit, first, then):
    options = ("--precision", "fp64", "--epochs", "3")
    digest(kit, *ALONE, *options, "--snapshot", "alone.pt")
    kit.run(*first, *options, *SNAPSHOT, "--steps", "20")
    digest(kit, *then, *options, *SNAPSHOT)
    expected, found = load(kit, "alone.pt")["model"], load(kit)["model"]
    differences = [(expected[name] - found[name]).abs().max().item() for name in expected]
    assert max(differences) < 1e-9, differences


@pytest.mark.slow
@pytest.mark.parametrize("command", [SPAWN, TORCHRUN], ids=["spawn", "torchrun"])
def test_many_kills(kit, command):
    """One rank, all ranks or the launcher, at random moments, also while it starts, until three had saved meanwhile."""
    harden(kit)
    command = (*command, "--epochs", "120", "--accum", "2")
    undisturbed = digest(kit, *command, timeout=300)
    moments, kills, steps = random.Random(7), {"rank": 0, "all": 0, "launcher": 0, "starting": 0}, [0]
    while len(set(steps)) < 4:
        lines = len(kit.metrics("killed.jsonl", "step"))
        run = kit.start(*command, *SNAPSHOT, "--save-every", "5", "--metrics", "killed.jsonl")
        starting = moments.random() < 0.2
        if not starting:
            run.wait_for(lambda lines=lines: len(kit.metrics("killed.jsonl", "step")) > lines)
        time.sleep(moments.random() * (3 if starting else 0.3))
        kind = moments.choice(["rank", "all", "launcher"])
        kills["starting" if starting else kind] += 1
        if kind == "all":
            kit.kill_all()
        else:
            ranks = ranks_of(kit, run)
            os.kill(run.pid if kind == "launcher" or not ranks else moments.choice(ranks), signal.SIGKILL)
        result = run.result(timeout=60)
        assert result.status != 0 and not result.processes, result
        remove_temporary_files(kit)
        if (kit.path / "run.pt").exists():
            steps.append(load(kit)["run"]["position"]["step_count"])
            assert steps[-1] >= steps[-2]
    print(f"killed {kills}, snapshots at steps {steps}")
    assert steps[-1] < 1680
    assert digest(kit, *command, *SNAPSHOT, timeout=300) == undisturbed


@pytest.mark.slow
def test_kills_while_saving(kit):
    text = (kit.path / "common" / "job.py").read_text()
    text = text.replace("nn.Linear(64, 64)", "nn.Linear(64, 100_000)").replace(
        "nn.Linear(64, 10)", "nn.Linear(100_000, 10)"
    )
    (kit.path / "common" / "job.py").write_text(text)
    moments, step, torn, kills = random.Random(7), 0, 0, 0
    path, temporary = kit.path / "run.pt", kit.path / "run.pt.tmp"

    def saving_since(start):
        with contextlib.suppress(FileNotFoundError):  # between two of them
            return temporary.stat().st_mtime > start

    while not step or torn < 2:
        kills += 1
        run = kit.start(*ALONE, *SNAPSHOT, "--save-every", "1", "--epochs", "100", "--lr", "0.001")
        start = time.time()
        run.wait_for(lambda start=start: saving_since(start))
        time.sleep(moments.random() * 0.3)
        kit.kill_all()
        run.result()
        torn += temporary.exists()
        if path.exists():
            assert path.stat().st_size > 50e6
            saved = load(kit)["run"]["position"]["step_count"]
            assert saved >= step
            step = saved
    print(f"{kills} kills while saving, {torn} of them left half a file behind, last snapshot at step {step}")
    result = kit.run(*ALONE, *SNAPSHOT, "--epochs", "100", "--lr", "0.001", "--steps", str(step + 1))
    assert result.status == 0 and not temporary.exists()
    assert load(kit)["run"]["position"]["step_count"] == step + 1


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [2])
def test_elastic_restarts(kit, restarts):
    kill_in_forward(kit, 10, when=f"int(os.environ['TORCHELASTIC_RESTART_COUNT']) < {restarts}")
    command = ("ddp_torchrun.py", "--epochs", "6", *SNAPSHOT, "--save-every", "3")
    launcher = (*TORCHRUN[:3], "--nproc_per_node=2", f"--max-restarts={restarts}")
    found = digest(kit, *launcher, *command, timeout=30 + 20 * restarts)
    assert (kit.path / "killed").read_text() == "x" * restarts
    (kit.path / "run.pt").unlink()
    (kit.path / "run.pt.prev").unlink()
    kit.edit("common/job.py", "        self.register_forward_pre_hook(die)\n", "")
    assert digest(kit, *TORCHRUN[:-1], *command) == found


def test_ranks_with_disks_of_their_own(kit):
    """The newest snapshot that any rank finds is the one. A bad one on one disk ends all ranks."""
    options = ("--precision", "fp64", "--epochs", "2")
    undisturbed = digest(kit, *RANKS, *options)
    for rank, steps in enumerate(("3", "17")):
        (kit.path / f"disk{rank}").mkdir()
        kit.run(*RANKS, *options, "--snapshot", f"disk{rank}/run.pt", "--steps", steps)
    (kit.path / "disk2").mkdir()

    def start(disks):
        port = str(free_port())
        for rank, disk in enumerate(disks):
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            script = (*options, *SNAPSHOT, "--metrics", "metrics.jsonl", "--threads", "1")
            yield kit.start(*forked("../ddp_torchrun.py", *script), env=env, cwd=kit.path / disk)

    for disks in (["disk0", "disk1"], ["disk2", "disk0"]):
        results = [run.result() for run in list(start(disks))]
        assert [result.status for result in results] == [0, 0], results
        assert "after step 3/14 of epoch 2, 17 in all" in results[0].out or disks[0] == "disk2"
        assert kit.metrics(f"{disks[0]}/metrics.jsonl", "end")[-1]["weights_sha256"] == undisturbed
    (kit.path / "disk1" / "run.pt").write_text("hello")
    results = [run.result() for run in list(start(["disk0", "disk1"]))]
    assert all(result.status for result in results), results
    (line,) = [line for result in results for line in result.errors]
    assert "--snapshot run.pt is no whole snapshot of this kit (File is not a zip file)" in line


# ---------------------------------------------------------------------------------------------- SIGTERM, Ctrl-C


@pytest.mark.parametrize(
    "command, number, whom",
    [
        (SPAWN, signal.SIGTERM, "launcher"),
        (SPAWN, signal.SIGINT, "everybody"),
        (RANKS, signal.SIGTERM, "launcher"),
        slow(("python", "ddp_spawn.py"), signal.SIGTERM, "launcher"),
        slow(TORCHRUN, signal.SIGINT, "everybody"),
        slow(TORCHRUN, signal.SIGTERM, "one rank"),
        slow(ALONE, signal.SIGTERM, "everybody"),
        (PARALLEL, signal.SIGINT, "launcher"),
    ],
)
def test_stop_and_go_on(kit, command, number, whom):
    command = (*command, *SNAPSHOT, "--epochs", "100000", "--workers", "1" if whom == "everybody" else "0")
    run = kit.start(*command, "--metrics", "metrics.jsonl")
    run.wait_for(lambda: len(kit.metrics(event="step")) > 20)
    start = time.monotonic()
    if whom == "everybody":  # as from a terminal, or from SLURM
        os.killpg(run.pid, number)
    elif whom == "launcher":
        os.kill(run.pid, number)
    else:
        os.kill(ranks_of(kit, run)[-1], number)
    result = run.result(timeout=40)
    assert time.monotonic() - start < 20
    assert not result.processes and not result.files
    # torchrun has one status for whatever happened
    assert result.status == (1 if "-m" in command else 128 + number), result
    assert f"stopped by {signal.Signals(number).name} after step" in result.out
    assert "-m" in command or not result.err

    steps = load(kit)["run"]["position"]["step_count"]
    assert f", {steps} in all: the same command goes on from run.pt" in result.out
    assert steps == kit.metrics(event="step")[-1]["step"]
    found = digest(kit, *command, "--steps", str(steps + 5))
    (kit.path / "run.pt").unlink()
    (kit.path / "run.pt.prev").unlink(missing_ok=True)
    assert digest(kit, *command, "--steps", str(steps + 5)) == found


@pytest.mark.parametrize("command", [PARALLEL, SPAWN, slow(TORCHRUN)], ids=["dp", "spawn", "torchrun"])
def test_signal_during_evaluation(kit, command):
    kit.edit(
        "common/job.py",
        "    losses = F.",
        "    import time; time.sleep(0.3); open('scored', 'w')\n    losses = F.",
    )
    options = ("--batch-size", "12", "--epochs", "2", *SNAPSHOT)
    run = kit.start(*command, *options)
    run.wait_for(lambda: (kit.path / "scored").exists())
    os.kill(run.pid, signal.SIGTERM)
    result = run.result(timeout=20)
    assert "stopped by SIGTERM after step 119/119 of epoch 1, 119 in all" in result.out, result
    assert result.status == (1 if "-m" in command else 143) and not result.processes
    assert "test accuracy" not in result.out


@pytest.mark.parametrize("command", [PARALLEL, slow(SPAWN), slow(TORCHRUN)], ids=["dp", "spawn", "torchrun"])
def test_second_signal_ends_at_once(kit, command):
    kit.edit("common/job.py", "    return F.", "    import time; time.sleep(60)\n    return F.")
    run = kit.start(*command, "--metrics", "metrics.jsonl", *SNAPSHOT, "--workers", "1")
    run.wait_for(lambda: (kit.path / "metrics.jsonl").exists())
    time.sleep(2)  # until all listen to signals
    os.killpg(run.pid, signal.SIGINT)
    time.sleep(1.5)
    os.killpg(run.pid, signal.SIGINT)
    start = time.monotonic()
    result = run.result(timeout=30)
    assert time.monotonic() - start < 8 and not result.processes
    assert result.status == (1 if "-m" in command else 130)


# ---------------------------------------------------------------------------------------------- the file


def test_contents(kit):
    assert kit.run(*RANKS, *SNAPSHOT, "--steps", "15").status == 0
    saved = load(kit)
    assert saved.keys() == {"model", "optimizer", "schedule", "scaler", "run"}
    run = saved["run"]
    assert run.keys() == {"position", "settings", "own", "world_size", "torch", "id"}
    from common.job import ToyModel

    ToyModel().load_state_dict(saved["model"], strict=True)
    assert saved["schedule"]["last_epoch"] == 15
    position = run["position"]
    assert (position["epoch"], position["step"], position["step_count"], position["ended"]) == (1, 1, 15, False)
    assert run["settings"]["--seed"] == 0 and run["settings"]["--batch-size"] == 96
    assert run["settings"]["size of the train set"] == 1438
    assert run["world_size"] == 2 and run["torch"] == torch.__version__
    first, second = (own["random"] for own in run["own"])
    assert not torch.equal(first["cpu"], second["cpu"]) and first["python"] != second["python"]
    assert position["finished"]
    previous = load(kit, "run.pt.prev")["run"]["position"]
    assert previous["step_count"] == 14, "that of step 15 before the evaluation has given way"


class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"model") + 5000] ^= 1
    path.write_bytes(content)


GO_BACK = "`mv run.pt.prev run.pt` to go on from the one before, if any, or give another path to start anew"
BAD = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:30_000]), "(File is not a zip file)"),
    "empty": (lambda path: path.write_bytes(b""), "(File is not a zip file)"),
    "text": (lambda path: path.write_text("hello"), "(File is not a zip file)"),
    "flipped": (flip, "in it is damaged"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Code())), "(File is not a zip file)"),
    "code": (
        lambda path: torch.save({"model": Code()}, path),
        "it holds code, posix.system, but only plain numbers, strings",
    ),
    "foreign": (lambda path: torch.save({"net.weight": torch.ones(2)}, path), "('run')"),
}


@pytest.fixture
def saved(kit):
    """A kit with run.pt of step 15 and run.pt.prev of step 14."""
    assert kit.run(*PARALLEL, *SNAPSHOT, "--steps", "15").status == 0
    return kit


def refused(kit, *command):
    """The one error line of a run that changes nothing."""
    before = {path: path.lstat() for path in kit.path.glob("run.pt*")}
    result = kit.run(*command)
    assert result.status == (1 if "-m" in command else 2), result
    assert len(result.errors) == 1 and ("-m" in command or "Traceback" not in result.err)
    after = {path: path.lstat() for path in kit.path.glob("run.pt*")}
    assert [(path, info.st_ino, info.st_mtime_ns, info.st_size) for path, info in before.items()] == [
        (path, info.st_ino, info.st_mtime_ns, info.st_size) for path, info in after.items()
    ]
    assert not (kit.path / "executed").exists()
    return result.errors[0]


@pytest.mark.versions
def test_bad_snapshots(saved):
    content = (saved.path / "run.pt").read_bytes()
    for name, (spoil, words) in BAD.items():
        (saved.path / "run.pt").write_bytes(content)
        spoil(saved.path / "run.pt")
        line = refused(saved, *PARALLEL, *SNAPSHOT)
        assert "is no whole snapshot of this kit" in line and words in line and line.endswith(GO_BACK), (name, line)
    (saved.path / "run.pt.prev").replace(saved.path / "run.pt")
    result = saved.run(*PARALLEL, *SNAPSHOT, "--steps", "15")
    assert "goes on from run.pt after step 14/14 of epoch 1, 14 in all" in result.out


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "directory"])
def test_no_regular_file(kit, kind):
    path = kit.path / "run.pt"
    (kit.path / "run.pt.prev").touch()
    if kind == "link":
        path.symlink_to("run.pt.prev")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    words = f"(No such file or directory): {GO_BACK}" if kind == "missing" else "is a directory, a link or a device"
    assert words in refused(kit, *PARALLEL, *SNAPSHOT)


def test_snapshot_of_another_run(saved):
    for options, words in [
        (("--seed", "1"), "is of a run with --seed 0, this run has 1"),
        (("--batch-size", "48"), "is of a run with --batch-size 96, this run has 48"),
        (("--lr", "0.1"), "is of a run with --lr 0.2, this run has 0.1"),
        (
            ("--precision", "fp64"),
            "is of a run with model's net1.weight [64, 64] torch.float32, this run has [64, 64] torch.float64",
        ),
    ]:
        line = refused(saved, *PARALLEL, *SNAPSHOT, *options)
        assert words in line and line.endswith("change that back, or give another path to start anew")


def test_snapshot_of_another_job(saved):
    saved.edit("common/job.py", "self.relu = nn.ReLU()", "self.relu = nn.PReLU()")
    words = "is of a run with model's relu.weight absent, this run has [1] torch.float32"
    assert words in refused(saved, *PARALLEL, *SNAPSHOT)
    saved.edit("common/job.py", "round(len(samples) / 5)", "round(len(samples) / 4)")
    assert "is of a run with size of the train set 1438, this run has 13" in refused(saved, *PARALLEL, *SNAPSHOT)


@pytest.mark.parametrize("command", [SPAWN, slow(TORCHRUN), PAIRS], ids=["spawn", "torchrun", "pairs"])
def test_bad_snapshot_is_told_once(saved, command):
    flip(saved.path / "run.pt")
    assert "in it is damaged" in refused(saved, *command, *SNAPSHOT)


@pytest.mark.parametrize(
    "path, words",
    [
        ("missing/run.pt", "No such file or directory"),
        ("README.md/run.pt", "Not a directory"),
        ("/proc/run.pt", "cannot write there"),
        (".", "is a directory, a link or a device: give the path of a file"),
    ],
)
def test_place_that_cannot_be_written(kit, path, words):
    assert words in refused(kit, *PARALLEL, "--snapshot", path)


def test_save_every_needs_a_path(kit):
    assert "--save-every needs --snapshot PATH" in refused(kit, *PARALLEL, "--save-every", "2")


def test_disk_that_fills_up(saved):
    """The snapshot before a failed save is intact."""
    content = (saved.path / "run.pt").read_bytes()
    saved.first("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, 40 * 1024))")
    result = saved.run(*forked("first.py", "ddp_spawn.py"), *SNAPSHOT)
    assert result.status == 1 and len(result.errors) == 1, result
    assert "--snapshot run.pt of step 28 was not written" in result.errors[0]
    assert (saved.path / "run.pt").read_bytes() == content
    assert not (saved.path / "run.pt.tmp").exists()
    undisturbed = digest(saved, *PARALLEL, "--epochs", "2")
    assert digest(saved, *PARALLEL, *SNAPSHOT, "--epochs", "2") == undisturbed, "from step 16 on"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which only root may")
def test_disk_that_is_full(kit):
    mount = "mount -t tmpfs -o size=64k full full; head -c 60000 /dev/zero > full/zeros"
    command = f'{mount}; "$@" || status=$?; ls full; exit $status'
    (kit.path / "full").mkdir()
    result = kit.run(
        "unshare", "--mount", "sh", "-ec", command, "sh", "python", *PARALLEL[1:], "--snapshot", "full/run.pt"
    )
    assert result.status == 1 and len(result.err.splitlines()) == 1, result
    assert result.errors[0].startswith("error: --snapshot full/run.pt of step 14 was not written: "), result
    assert result.out.splitlines()[-1] == "zeros", "nothing is left behind"


# ---------------------------------------------------------------------------------------------- finished runs


FORWARD = "        return self.net2(self.relu(self.net1(pixels)))\n"
SAVE = """

def save(state, file, write=torch.save, **options):
    import time

    if str(getattr(file, "name", "")).endswith(".tmp"):
        {code}
    write(state, file, **options)


torch.save = save
"""


def test_training_goes_on_while_a_snapshot_is_written(kit):
    """A write waits for the third forward pass after it, and yet holds the weights of its step."""
    kit.edit("common/job.py", FORWARD, f"        calls.append(1)\n{FORWARD}")
    code = "end, late = len(calls) + 3, time.monotonic() + 2  # after the last write there are no more\n"
    code += "        while len(calls) < end and time.monotonic() < late: time.sleep(0.001)"
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write("\n\ncalls = []\n" + SAVE.format(code=code))
    undisturbed = digest(kit, *ALONE, "--epochs", "1")
    assert digest(kit, *ALONE, *SNAPSHOT, "--epochs", "1", "--save-every", "5") == undisturbed
    assert load(kit, "run.pt.prev")["run"]["position"]["step_count"] == 10
    (kit.path / "run.pt.prev").replace(kit.path / "run.pt")
    assert digest(kit, *ALONE, *SNAPSHOT, "--epochs", "1") == undisturbed


@pytest.mark.parametrize("command", [ALONE, slow(RANKS)], ids=["alone", "ranks"])
def test_failed_write_is_told_before_the_next(kit, command):
    """Step 100 is saved, and would be followed by step 199 after 20 seconds."""
    kit.edit("common/job.py", FORWARD, f"        slow_down()\n{FORWARD}")
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(SAVE.format(code='raise OSError(28, "No space left on device")'))
        file.write("\n\ndef slow_down(calls=[]):\n    import time\n")
        file.write("    calls.append(1)\n    time.sleep(0.2 * (len(calls) > 100))\n")
    result = kit.run(*command, *SNAPSHOT, "--batch-size", "2", "--save-every", "100", "--metrics", "metrics.jsonl")
    assert result.status == 1 and len(result.errors) == 1, result
    assert "--snapshot run.pt of step 100 was not written: No space left on device" in result.errors[0]
    assert 100 <= len(kit.metrics(event="step")) < 190


@pytest.mark.parametrize("command", [ALONE, PARALLEL], ids=["alone", "dp"])
def test_failed_write_is_told_after_a_break(kit, command):
    """A user's script that leaves the loop over the epochs ends as a failure where its snapshot was not written."""
    kit.edit(command[1], "run.evaluate(test_set)", "break")
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(SAVE.format(code='time.sleep(1)\n        raise OSError(28, "No space left on device")'))
    result = kit.run(*command, *SNAPSHOT)
    assert result.status == 1 and len(result.errors) == 1, result
    assert "--snapshot run.pt of step 14 was not written: No space left on device" in result.errors[0]


def test_finished_run(saved):
    options = (*SNAPSHOT, "--epochs", "2", "--metrics", "metrics.jsonl")
    assert saved.run(*PARALLEL, *options).status == 0
    end, content = saved.metrics()[-1], (saved.path / "run.pt").read_bytes()
    result = saved.run(*PARALLEL, *options)
    assert result.status == 0
    assert (
        "goes on from run.pt after step 14/14 of epoch 2, 28 in all: nothing left to train, but with more --epochs"
        in result.out
    )
    assert (saved.path / "run.pt").read_bytes() == content
    again = saved.metrics()
    assert [line["event"] for line in again[-2:]] == ["eval", "end"] and again[-2]["step"] == again[-1]["step"] == 28
    for key in ("accuracy", "weights_sha256"):
        assert again[-1][key] == end[key]
    assert again[-1]["loss"] == pytest.approx(end["loss"], abs=1e-12)

    steps = [line["step"] for line in saved.metrics(event="step")]
    saved.run(*PARALLEL, *SNAPSHOT, "--epochs", "3", "--metrics", "metrics.jsonl")
    assert [line["step"] for line in saved.metrics(event="step")] == [*steps, *range(29, 43)]


def test_left_over_temporary_is_removed(kit):
    (kit.path / "run.pt.tmp").write_bytes(b"half")
    assert kit.run(*PARALLEL, *SNAPSHOT, "--epochs", "1").status == 0
    assert sorted(path.name for path in kit.path.glob("run.pt*")) == ["run.pt"]

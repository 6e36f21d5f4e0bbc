"""Runs the scripts as a user does, in subprocesses, and sees what they leave behind."""

import atexit
import compileall
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
TORCH = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))  # without the import of it
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")
# Older versions of torch take port 29500 where none is given, and several tests run at once.
ANY_PORT = ("--standalone",) if TORCH < (2, 13) else ()


def torchrun(nproc, script, *options):
    return (*TORCHRUN, *ANY_PORT, f"--nproc_per_node={nproc}", script, *options)


def forked(script, *options):
    """As `python SCRIPT`, but spares the import of torch: see `preloaded.py`. mp.spawn forks there, too."""
    return ("forked", script, *options)


def forked_ranks(count, script, *options):
    """Ranks started by hand, each of them forked; they meet in a file. The status is the first that is not 0."""
    return (f"forked {count}", script, *options)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Result:
    status: int
    out: str
    err: str
    processes: list  # left running, as (pid, command line)
    files: list  # left in the directory for temporary files

    @property
    def errors(self):
        return [line for line in self.err.splitlines() if line.startswith("error:")]


class Forks:
    """The process from which scripts are forked, one for all tests of a pytest worker. It ends with the worker."""

    def __init__(self):
        self.process = None

    def ask(self, **order):
        if not self.process:
            command = [PYTHON, Path(__file__).with_name("preloaded.py")]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd="/", env=environment(), text=True)
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


FORKS = Forks()


class Forked:
    """A forked script, with what `subprocess.Popen` has."""

    def __init__(self, argv, env, cwd, kit):
        self.returncode, self.files = None, [kit.path.parent / f"{uuid.uuid4()}.{name}" for name in ("out", "err")]
        out, err = map(str, self.files)
        self.pid = FORKS.ask(argv=argv, env=env, cwd=str(cwd), out=out, err=err)

    def poll(self, limit=0):
        if self.returncode is None:
            self.returncode = FORKS.ask(wait=self.pid, limit=limit)
        return self.returncode

    def communicate(self, timeout=60):
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("forked", timeout)
        return tuple(file.read_text(errors="replace") for file in self.files)


class ForkedRanks:
    """Several of them, as if they were one process."""

    def __init__(self, count, argv, env, cwd, kit):
        argv = [*argv, "--init-method", f"file://{kit.path.parent}/{uuid.uuid4()}"]
        size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        places = [size | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        self.ranks = [Forked(argv, env | place, cwd, kit) for place in places]
        self.pid = self.ranks[0].pid

    def poll(self):
        codes = [rank.poll() for rank in self.ranks]
        self.returncode = None if None in codes else next(filter(None, codes), 0)
        return self.returncode

    def communicate(self, timeout=60):
        end = time.monotonic() + timeout
        texts = [rank.communicate(max(0, end - time.monotonic())) for rank in self.ranks]
        self.poll()
        return tuple("".join(parts) for parts in zip(*texts, strict=True))


class Running:
    """A started command."""

    def __init__(self, kit, command, env, cwd=None, **options):
        self.kit = kit
        environment, cwd = kit.env | env, cwd or kit.path
        command = [PYTHON if word == "python" else str(word) for word in command]
        kind, _, count = command[0].partition(" ")
        if kind == "forked":
            what = command[1:], environment, cwd, kit
            self.process = ForkedRanks(int(count), *what) if count else Forked(*what)
            kit.sessions |= {rank.pid for rank in getattr(self.process, "ranks", [self.process])}
        else:
            streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
            self.process = subprocess.Popen(
                command, cwd=cwd, env=environment, text=True, start_new_session=True, **streams
            )
        self.pid = self.process.pid

    def wait_for(self, condition, timeout=60):
        """Wait until `condition()` is true, and fail where the process ends before."""
        end = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended too soon: {self.process.communicate()}"
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)

    def result(self, timeout=90):
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kit.kill_all()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout} s\n{out}\n{err}") from None
        end = time.monotonic() + 3  # a killed process is there until it is reaped
        while self.kit.processes() and time.monotonic() < end:
            time.sleep(0.05)
        return Result(self.process.returncode, out, err, self.kit.processes(), self.kit.temporary_files())


def environment():
    """Without what a launcher sets. Threads do not spin while they wait: several tests share the cores."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMIX_", "SLURM_", "OMP_")
    return {key: value for key, value in os.environ.items() if not key.startswith(launchers)} | {
        "OMP_WAIT_POLICY": "passive"
    }


@functools.cache
def compiled():
    """A copy of the kit, compiled once for all tests of a pytest worker.

    Python looks whether a file's digest is that of what was compiled: two edits within a second have the same time.
    """
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    path = Path(directory, "kit")
    shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks"))
    compileall.compile_dir(path, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return path


class Kit:
    """A copy of the kit, which a test may edit as a user would, and the processes started in it."""

    def __init__(self, path):
        self.path = path / "kit"
        self.directory = tempfile.TemporaryDirectory(prefix="kit-")
        self.temporary = Path(self.directory.name)  # short, since sockets are made in it
        self.mark = f"KIT_TEST={uuid.uuid4()}"
        shutil.copytree(compiled(), self.path)
        self.env = environment() | {"TMPDIR": str(self.temporary), "KIT_TEST": self.mark.partition("=")[2]}
        self.sessions = set()  # of forked processes, which have no mark

    def edit(self, name, old, new):
        text = (self.path / name).read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        (self.path / name).write_text(text.replace(old, new))

    def first(self, code):
        """Write first.py, which runs `code` and then the script that is its first argument."""
        then = "import runpy, sys\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
        (self.path / "first.py").write_text(f"{code}\n{then}")

    def fault(self, code, rank=1, call=5):
        """Let a rank run `code` in this forward pass of training."""
        layer = "        self.net2 = nn.Linear(64, 10)\n"
        self.edit("common/job.py", layer, f"{layer}        self.register_forward_pre_hook(fault)\n")
        with (self.path / "common" / "job.py").open("a") as file:
            file.write(
                "\n\ndef fault(model, _, calls=[]):\n    import os, signal, sys, time\n    calls.append(1)\n"
                f"    if os.environ.get('RANK', '0') == '{rank}' and len(calls) == {call}:\n        {code}\n"
            )

    def start(self, *command, env=None, **options):
        return Running(self, command, env or {}, **options)

    def run(self, *command, env=None, timeout=240):
        """Run to the end; nothing may be left behind."""
        result = self.start(*command, env=env).result(timeout)
        assert not result.processes, f"left running: {result.processes}"
        assert not result.files, f"left behind: {result.files}"
        return result

    def metrics(self, name="metrics.jsonl", event=None):
        path = self.path / name
        lines = path.read_text().splitlines() if path.exists() else []
        events = [json.loads(line) for line in lines]
        return [line for line in events if event in (None, line["event"])]

    def processes(self):
        """(pid, command line) of what was started here and still runs."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                marked = self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if (marked or int(session) in self.sessions) and state != "Z":
                    found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                pass  # gone meanwhile, or another user's
        return found

    def temporary_files(self):
        # torchrun makes a directory for its logs and leaves it, whatever it runs. Importing torch 2.6 makes one with
        # this file in it, and a killed process leaves it.
        paths = [path for path in self.temporary.iterdir() if not (path / "_remote_module_non_scriptable.py").exists()]
        return [path.name for path in paths if not path.name.startswith(("torchelastic_", "torchinductor_"))]

    def kill_all(self):
        while self.processes():
            for pid, _ in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def files(directory):
    """{path: digest, or where a link leads} of all files."""
    paths = [path for path in directory.rglob("*") if "__pycache__" not in path.parts and not path.is_dir()]
    return {
        str(path.relative_to(directory)): str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }

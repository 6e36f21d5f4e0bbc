"""Runs the scripts as a user does, in subprocesses, and sees what they leave behind."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")


def torchrun(nproc, script, *options):
    return (*TORCHRUN, f"--nproc_per_node={nproc}", script, *options)


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


class Running:
    """A started command."""

    def __init__(self, kit, command, env, **options):
        self.kit = kit
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
        environment = kit.env | env
        command = [PYTHON if word == "python" else str(word) for word in command]
        self.process = subprocess.Popen(
            command, cwd=kit.path, env=environment, text=True, start_new_session=True, **streams
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


class Kit:
    """A copy of the kit, which a test may edit as a user would, and the processes started in it."""

    def __init__(self, path):
        self.path = path / "kit"
        self.temporary = path / "tmp"
        self.temporary.mkdir()
        self.mark = f"KIT_TEST={uuid.uuid4()}"
        ignore = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks")
        shutil.copytree(ROOT, self.path, ignore=ignore)
        launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMIX_", "SLURM_", "OMP_")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
        self.env |= {"TMPDIR": str(self.temporary), "KIT_TEST": self.mark.partition("=")[2]}
        # Several tests share the cores: threads that spin while they wait would slow all of them down many times over.
        self.env["OMP_WAIT_POLICY"] = "passive"

    def edit(self, name, old, new):
        text = (self.path / name).read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
        (self.path / name).write_text(text.replace(old, new))

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
                if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                pass  # gone meanwhile, or another user's
        return found

    def temporary_files(self):
        # torchrun makes a directory for its logs and leaves it, whatever it runs.
        names = [path.name for path in self.temporary.iterdir()]
        return [name for name in names if not name.startswith(("torchelastic_", "torchinductor_"))]

    def kill_all(self):
        while self.processes():
            for pid, _ in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


class Preloaded:
    """Runs the scripts of a kit one after the other, each forked from a process that has imported torch."""

    def __init__(self, kit):
        self.kit, self.path = kit, kit.path
        command = [PYTHON, Path(__file__).with_name("preloaded.py")]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=kit.path, env=kit.env, text=True)

    def run(self, script, *options, env=None, cwd=None, limit=60):
        """{"status", "out", "err"}; asserts what holds for any run."""
        cwd = str(cwd or self.path)
        run = {"argv": [str(self.path / script), *options], "env": env or {}, "cwd": cwd, "limit": limit}
        self.process.stdin.write(json.dumps(run) + "\n")
        self.process.stdin.flush()
        result = json.loads(self.process.stdout.readline())
        lines = [line for line in result["err"].splitlines() if "UserWarning" not in line]
        assert result["status"] in (0, 1, 2), result
        assert "Traceback" not in result["err"], result
        if result["status"]:
            assert [line[:7] for line in lines if not line.startswith("waiting for ")] == ["error: "], result
        return result

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(10) == 0


def files(directory):
    """{path: digest, or where a link leads} of all files."""
    paths = [path for path in directory.rglob("*") if "__pycache__" not in path.parts and not path.is_dir()]
    return {
        str(path.relative_to(directory)): str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }

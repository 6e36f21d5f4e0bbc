"""Starts programs side by side and lets one at a time take some steps, so that all meet the same moods of the machine.

A program waits after its first step and after each block of steps that it was told to take; see `job.py`.
"""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path

from benchmarks.models import BATCHES, RATES

HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")


@dataclass
class Program:
    """A command, and what `job.py` needs to know; `batch` is the global one."""

    command: tuple
    size: str
    batch: int
    processes: int = 2
    threads: int = 1
    epochs: int = 100_000
    process: subprocess.Popen = field(default=None, init=False)
    started: float = field(default=0, init=False)  # seconds since the epoch
    connections: list = field(default_factory=list, init=False)
    stamps: list = field(default_factory=list, init=False)

    def let_go(self, count):
        for connection in self.connections:
            connection.send(count)

    def wait(self):
        """(seconds that the slowest process took for its block, sum of the weights after it, its peak memory in MiB)"""
        return max(connection.recv() for connection in self.connections)


def torchrun(script, size, *, processes=2, threads=1, batch=None):
    """A script of the kit or of the peers under torchrun."""
    batch = batch or BATCHES[size]
    command = (*TORCHRUN, f"--nproc-per-node={processes}", script)
    if script.startswith("ddp_"):
        command += kit_options(size, batch, threads, 100_000)
    return Program(command, size, batch, processes, threads)


def spawn(script, size, epochs=100_000):
    """A script of the kit or the bare one, which starts two processes by mp.spawn."""
    options = kit_options(size, BATCHES[size], 1, epochs) if script.startswith("ddp_") else ()
    return Program((sys.executable, script, *options), size, BATCHES[size], epochs=epochs)


def kit_options(size, batch, threads, epochs):
    options = {"--batch-size": batch, "--lr": RATES[size], "--threads": threads, "--epochs": epochs}
    return tuple(str(word) for option in options.items() for word in option)


@contextlib.contextmanager
def kit():
    """Yield a copy of the kit, with the peers beside its scripts and the benchmarks' job in place of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        path = Path(directory)
        for script in [*HERE.parent.glob("*.py"), *HERE.glob("peers/*.py")]:
            shutil.copy(script, path)
        shutil.copytree(HERE.parent / "data", path / "data")
        shutil.copytree(HERE.parent / "common", path / "common")
        (path / "common" / "job.py").rename(path / "common" / "digits.py")
        for name in ("job.py", "models.py"):
            shutil.copy(HERE / name, path / "common")
        yield path


@contextlib.contextmanager
def started(programs):
    """Start {name: `Program`} one after the other; yield when each has finished its first step; kill them in the end.

    Raises `RuntimeError`, with what it printed, where one does not come to its first step.
    """
    with kit() as directory, contextlib.ExitStack() as stack:
        address = str(directory / "socket")
        listener = stack.enter_context(Listener(address, "AF_UNIX", backlog=64))
        listener._listener._socket.settimeout(1)  # there is no public name for it
        launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "OMP_")
        for name, program in programs.items():
            output = stack.enter_context((directory / f"{name}.out").open("w+"))
            environment = {key: value for key, value in os.environ.items() if not key.startswith(launchers)} | {
                "BENCHMARK_ADDRESS": address,
                "BENCHMARK_SIZE": program.size,
                "BENCHMARK_BATCH": str(program.batch),
                "BENCHMARK_EPOCHS": str(program.epochs),
                "OMP_NUM_THREADS": str(program.threads),
                "TMPDIR": str(directory),
            }
            program.connections, program.stamps, program.started = [], [], time.time()
            program.process = process = subprocess.Popen(
                program.command, cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            stack.callback(_end, process, program)
            _meet(listener, program, process, output)
        yield


def _meet(listener, program, process, output):
    end = time.monotonic() + 120
    while len(program.connections) < program.processes:
        try:
            program.connections.append(listener.accept())
        except TimeoutError:
            if process.poll() is not None or time.monotonic() > end:
                output.seek(0)
                raise RuntimeError(f"no first step of {' '.join(program.command)}: {output.read()}") from None
    program.stamps = [connection.recv() for connection in program.connections]


def _end(process, program):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for connection in program.connections:  # its processes wait there, and end when it is closed
        connection.close()


def race(programs, turns=None, *, starts=3, rounds=30, seconds=0.1):
    """Let the programs take blocks of steps in turns. Returns {turn: [seconds per step, one of each round]}.

    programs: {name: `Program`}; all are started anew `starts` times, since two processes of the same program differ, by
    chance, in how their memory lies. turns: {turn: names of the programs that take theirs at the same time}, each alone
    by default. rounds: of each start. seconds: of a block, roughly.
    """
    turns = turns or {name: [name] for name in programs}
    times = {turn: [] for turn in turns}

    def take(turn, count):
        for name in turns[turn]:
            programs[name].let_go(count)
        return max(programs[name].wait()[0] for name in turns[turn]) / count

    for _ in range(starts):
        with started(programs):
            for _ in range(2):  # warm up, and see how many steps a block takes
                speeds = {turn: take(turn, 20) for turn in turns}
            for number in range(rounds):
                order = list(turns)
                first = number % len(order)  # none comes always after the same one
                for turn in order[first:] + order[:first]:
                    times[turn].append(take(turn, max(5, round(seconds / speeds[turn]))))
    return times


def ratios(times, baseline):
    """{name: its median in ms, and the median and quartiles of its ratio to the baseline in the same round}"""
    found = {}
    for name, values in times.items():
        paired = [value / base for value, base in zip(values, times[baseline], strict=True)]
        found[name] = {"ms": round(1000 * statistics.median(values), 4), **spread(paired, "ratio")}
    return found


def spread(values, name):
    """The median, under this name, and the quartiles of at least two values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {name: round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}

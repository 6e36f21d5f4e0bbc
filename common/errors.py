"""What ends a process, told in one line; and the one object that lives as long as the process."""

import atexit
import errno
import functools
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.multiprocessing as mp


class RunError(Exception):
    """What went wrong and what to do, found by all processes of a machine alike: one line, status 1.

    Any exception with an `exit_status` is told in one line, without a traceback, and ends the process with that.
    """

    exit_status = 1


class UserError(RunError):
    """A mistake of the user's: one line, status 2."""

    exit_status = 2


class Process:
    """What belongs to this process as a whole, from the beginning of `entry` to its end.

    at_end: a list. Who needs something done when all went well puts a function there; `end` calls them. where: a
    function that says where in its training this process is. watch: what the ranks let each other know of their
    failures, once they have met (`watch.Watch`); it tells of them. node: the rank of this machine; address: by which
    others reach it, or None. backends: the process group's that was left, see `let_go`.
    """

    def __init__(self):
        self.at_end, self.where, self.node = [], lambda: "the start", 0
        self.watch = self.address = self.backends = None

    def end(self):
        """Do what is left to do, the last first. Where something fails, what would follow is not done."""
        while self.at_end:
            self.at_end.pop()()

    def let_go(self, finished):
        """Drop all of this, and with it what a run holds."""
        backends = self.backends
        if not finished:
            kill_workers()  # they may be in the midst of something, and would be waited for
        self.__init__()
        # Loaders and DDP lie in reference cycles. Collected here, loader workers end in order, and so do gloo's
        # threads: one that lets go of a tensor while the interpreter ends would abort the process. Neither DDP nor the
        # group of torch 2.6 may be the last to release a backend: they keep Python's lock, which its threads wait for.
        gc.collect()
        del backends
        kill_workers()  # those that still did not end: they ignore SIGTERM, and Python would wait for them


def entry(main):
    """Decorate the entry of a process: an error ends it in one line; success leaves together with the other ranks."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see common/__init__.py; all is imported now
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if main.__module__ in ("__main__", "__mp_main__"):  # this process is the script's own
        # The collector need not look at what torch consists of, neither now nor at the end, which comes sooner by this.
        gc.freeze()
        gc.enable()

    @functools.wraps(main)
    def wrapper(*args):
        open_streams()
        signals = {number: signal.getsignal(number) for number in stop_signals()}
        status = 1
        try:
            main(*args)
            process.end()
            status = 0
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            status = process.watch.tell(error) if process.watch else tell(error)
        finally:
            met = process.watch is not None
            process.let_go(finished=not status)
        if not met and status < 128:  # else a launcher that ends the ranks may signal this one once more
            for number, handler in signals.items():  # a notebook goes on
                signal.signal(number, handler)
        if status and met and mp.parent_process() is None:
            leave(status)  # the process group was not left
        if status:
            sys.exit(status)

    return wrapper


def leave(status):
    """End this process without its interpreter's end, in which a thread of torch's that lets go of a tensor aborts it.

    As multiprocessing ends its children: after threads, one of which may write a snapshot, and what `atexit` has.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Stream(io.FileIO):
    """Standard output or standard error. Where it is closed or full nothing ends: what cannot be printed is let go."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() == 1 and error.errno == errno.ENOSPC:
                sys.stderr.write(f"standard output: {error.strerror}; what is printed from here on is lost\n")
            return len(data)


def open_streams():
    """Let what is printed come out line by line, whole among other processes' lines, and see `Stream`."""
    if sys.platform == "win32":
        return
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # one was closed from the start: else a snapshot's file might take its number
    os.close(null)
    for number, name in (1, "stdout"), (2, "stderr"):
        stream = getattr(sys, name)
        if stream is None or type(stream) is io.TextIOWrapper:  # else a notebook's
            buffer = io.BufferedWriter(Stream(number, "w", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            # A path may hold what the terminal's encoding lacks.
            setattr(sys, name, io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True))


def stop_signals():
    """The signals by which a run is stopped; a closed terminal's where `nohup` does not let it be ignored."""
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    ignored = hangup is None or signal.getsignal(hangup) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if ignored else [hangup])


def launcher():
    """The name of what started this process, or None; a user's own RANK counts as torchrun's."""
    if "RANK" in os.environ:
        return "torchrun"
    # A single task is as good as none: most often an interactive shell, where any script may be started. A batch
    # script has a rank too, but no step and so no number of tasks in it.
    if os.environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return "mpirun"
    return "srun" if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in os.environ else None


def tell(error):
    """Tell of the exception that ends a process which has not met others. Returns the exit status."""
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not hasattr(error, "exit_status"):
        write_error(f"failed in {process.where()}: {describe(error)}", "".join(traceback.format_exception(error)))
        return 1
    # All processes of a machine may find the same. The first one shall tell it.
    local = filter(None, map(os.environ.get, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")))
    first = next(local, "0") == "0" or not launcher()
    if not first and (launcher() == "mpirun" or "TORCHELASTIC_RUN_ID" in os.environ):
        time.sleep(10)  # these end all as soon as one has ended; where none ends this one, the error is its own
    if first or launcher() != "srun":  # which lets the first one speak
        write_error(str(error))
    leave_for_torchrun(str(error), error.exit_status)
    return error.exit_status


def leave_for_torchrun(line, status, later=0):
    """Let torchrun's summary show this. What is the earliest there it calls the root cause; later: seconds."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()) + later)}
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and "DDP_AGENT" not in os.environ
    if restarts and status == UserError.exit_status and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)  # it would try again and again what cannot succeed


def write_error(line, details=""):
    """Tell in one line, whatever a path or an argument in it holds."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
    sys.stderr.write(f"{details}error: {line}\n")


def describe(error):
    """An exception and its cause in one line. What a loader worker or a replica handed on ends with its own words."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if lines[0].startswith("Caught ") else f"{type(error).__name__}: {lines[0]}"
    return line + (f" ({describe(error.__cause__)})" if error.__cause__ and str(error.__cause__) else "")


def kill_workers():
    workers = mp.active_children()
    if workers and sys.platform != "win32":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report them as killed
    for worker in workers:
        worker.kill()


process = Process()

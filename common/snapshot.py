"""Saving and resuming what is named: a snapshot is whole or absent, and a run goes on from it exactly."""

import os
import pickle
import re
import secrets
import signal
import time
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from common import ranks, states
from common.errors import RunError, UserError, process, stop_signals

import torch


def listen():
    """Note SIGTERM, Ctrl-C or a closed terminal. Returns a list: empty, or the signal's number first."""
    received = []

    def receive(number, frame):
        if not received:
            received.extend([number, time.monotonic()])
        elif time.monotonic() - received[1] > 1:  # sooner it is the same one, which the launcher passes on
            os._exit(128 + number)

    for number in stop_signals():
        signal.signal(number, receive)
    return received


class Snapshots:
    """The newest snapshot of a run, at `args.snapshot`, and the one before it, at `args.snapshot`.prev.

    A snapshot is a dict of CPU tensors and plain types: each named object's state, as rank 0 has it, gathered where it
    is sharded; and "run", a dict: "position" (what `save` was given, numbers, "step_count" among them), "settings"
    (what makes a run this run and no other), "own" (of each rank: its random states and the small states, such as those
    of generators), "world_size", "torch" (its version) and "id". All ranks call `resume`, `save` and `finish` together.
    """

    def __init__(self, args, named, wrapped, size):
        """named: {name: object}; wrapped: the model as it is trained; size: of the train set. Raises `UserError`."""
        self.path, self.named, self.wrapped = args.snapshot, named, wrapped
        self.previous, self.temporary = Path(f"{self.path}.prev"), Path(f"{self.path}.tmp")
        self.settings = {"--seed": args.seed, "--batch-size": args.batch_size, "--lr": args.lr}
        self.settings |= {"size of the train set": size, "the names": ", ".join(sorted(named))}
        self.settings |= states.description(named)
        self.thread, self.writing, self.saved = ThreadPoolExecutor(1), Future(), None  # saved: the newest's position
        self.writing.set_result(None)
        process.at_end.append(self.finish)
        ranks.from_rank(0, self._check_place)

    def resume(self):
        """Load the newest snapshot that any rank finds at the path into what is named and the random states.

        Returns its position, or None where there is none. Raises `UserError` where a rank finds something else.
        """
        state = self._read()
        keys = ranks.gather_objects((state["run"]["position"]["step_count"], state["run"]["id"]) if state else ())
        if not any(keys):
            return None
        if len(set(keys)) > 1:  # each machine has a disk of its own
            state = ranks.from_rank(keys.index(max(keys)), lambda: state)
        run = state["run"]
        own, same = run["own"][ranks.rank() % run["world_size"]], run["world_size"] == ranks.world_size()
        if not same:
            states.seed(run["settings"]["--seed"], run["position"]["step_count"])
        for name, one in self.named.items():
            if same or not isinstance(one, torch.Generator):
                states.set_state(one, own["states"].get(name, state[name]))
            else:
                one.manual_seed(torch.initial_seed())
        if same:
            states.set_random(self.wrapped, own["random"])
        self.saved = run["position"]
        return self.saved

    def save(self, position):
        """Call `finish`, copy what a snapshot holds, and let a thread of rank 0 write it while the training goes on.

        Where nothing was trained since the last one, there is nothing to save.
        """
        if position == self.saved:
            return
        self.finish()
        self.saved = position
        state = {name: states.access(one)[0]() for name, one in self.named.items()}
        small = {name: value for name, value in state.items() if states.is_own(self.named[name], value)}
        own = {"random": states.get_random(self.wrapped), "states": states.copied(small)}
        own = ranks.gather_objects(own, everywhere=False)
        state = states.copied(state, keep=ranks.rank() == 0)
        if ranks.rank() == 0:
            run = {"position": position, "settings": self.settings, "own": own, "id": secrets.token_hex(8)}
            state["run"] = run | {"world_size": ranks.world_size(), "torch": str(torch.__version__)}
            self.writing = self.thread.submit(self._write, state)

    def finish(self):
        """Wait until the last snapshot is on disk. Raises `RunError` on all ranks where it was not written."""
        ranks.from_rank(0, self.writing.result)

    def failed(self):
        """Whether this rank knows already that `finish` will raise."""
        return self.writing.done() and self.writing.exception() is not None

    def _check_place(self):
        try:
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
                raise UserError(f"--snapshot {self.path} is a directory, a link or a device: give the path of a file")
            self.temporary.unlink(missing_ok=True)  # of a run that was killed while it saved
            self.temporary.touch(exist_ok=False)
            self.temporary.unlink()
        except OSError as error:
            raise UserError(f"--snapshot {self.path}: cannot write there: {error.strerror}") from None

    def _read(self):
        """What is at the path, or None. Raises `UserError` where it is no snapshot, or another run's."""
        if not self.path.exists() and not self.previous.exists():
            return None
        try:
            with zipfile.ZipFile(self.path) as file:
                if damaged := file.testzip():  # torch does not look at the checksums that it writes
                    raise ValueError(f"{damaged} in it is damaged")
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            there = state["run"]["settings"]
        except Exception as error:  # whatever a foreign file brings about
            several = process.watch and not process.watch.ranks.one_machine
            where = f" on {ranks.this_machine()}" if several else ""
            raise UserError(
                f"--snapshot {self.path}{where} is no whole snapshot of this kit ({_cause(error)}): `mv "
                f"{self.previous} {self.path}` to go on from the one before, if any, or give another path to start anew"
            ) from None
        for name in [*self.settings, *there]:
            saved, mine = there.get(name, "absent"), self.settings.get(name, "absent")
            if saved != mine and str(saved) != str(mine):  # nan is not nan, and 0 is 0.0
                raise UserError(
                    f"--snapshot {self.path} is of a run with {name} {saved}, this run has {mine}: change that back, "
                    "or give another path to start anew"
                )
        return state

    def _write(self, state):
        try:
            weights = dict(self.named["model"].named_parameters())
            for name, value in state["model"].items():
                # The sum is fast, and not finite where a number is not, but also where it overflows.
                if name in weights and not value.sum().isfinite() and not value.isfinite().all():
                    raise ValueError(f"{name} is not finite: lower --lr, or try --clip 1")
            with self.temporary.open("xb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            torch.load(self.temporary, map_location="cpu", weights_only=True, mmap=True)  # what is written can be read
            # The one that follows the last evaluation has the weights of the one before it, and takes its place.
            if self.path.exists() and not state["run"]["position"].get("finished"):
                self.previous.unlink(missing_ok=True)
                try:
                    os.link(self.path, self.previous)  # so that at no moment the path is missing
                except OSError:  # a file system without hard links
                    self.path.replace(self.previous)
            self.temporary.replace(self.path)
        except Exception as error:  # a full disk is a RuntimeError to torch, and what is named may be of any class
            self.temporary.unlink(missing_ok=True)
            raise (UserError if isinstance(error, pickle.PickleError) else RunError)(
                f"--snapshot {self.path} of step {state['run']['position']['step_count']} was not written: "
                f"{_cause(error)}; the snapshot before it, if any, is untouched"
            ) from None


def _cause(error):
    """An exception in a few words."""
    if code := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it holds code, {code[1]}, but only plain numbers, strings, lists, dicts and tensors are read"
    return getattr(error, "strerror", None) or str(error).partition("\n")[0].partition(". ")[0] or repr(error)

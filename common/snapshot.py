"""Saving and resuming what is named: a snapshot is whole or absent, and a run goes on from it exactly."""

import copy
import io
import os
import pickle
import random
import re
import secrets
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ranks
from common.errors import RunError, UserError, describe, process

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

SMALL = 2**16  # bytes of tensors up to which a state is saved for each rank


class Snapshots:
    """The newest snapshot of a run, at `args.snapshot`, and the one before it, at `args.snapshot`.prev.

    A snapshot is a dict of CPU tensors and plain types: the state of each named object under its name, as rank 0 has
    it, and under "run" a dict: "position" (what `save` was given), "settings" (what makes a run this run and no other),
    "own" (of each rank: its random states and the small states, such as those of generators), "world_size", "torch"
    (its version) and "id". Tensors that are sharded over the ranks are gathered. All ranks call `resume`, `save` and
    `finish` together.
    """

    def __init__(self, args, named, wrapped, size):
        """named: {name: object}. wrapped: the model as it is trained. size: of the train set.

        Raises `UserError` where rank 0 could not write a snapshot.
        """
        self.path, self.named, self.wrapped = args.snapshot, named, wrapped
        self.previous, self.temporary = Path(f"{self.path}.prev"), Path(f"{self.path}.tmp")
        self.settings = {"--seed": args.seed, "--batch-size": args.batch_size, "--lr": args.lr}
        self.settings |= {
            "size of the train set": size,
            "the names": ", ".join(sorted(named)),
            **hyperparameters(named),
        }
        self.sharded = any(hasattr(parameter, "full_tensor") for parameter in wrapped.parameters())
        self.thread, self.writing = ThreadPoolExecutor(1), None
        process.at_end.callback(self.finish)
        ranks.from_rank(0, self._check_place)

    def resume(self):
        """Load the newest snapshot that any rank finds at the path into what is named and the random states.

        Returns its position, or None where there is no snapshot. Raises `UserError` on all ranks, with nothing loaded,
        where a rank finds something that is no snapshot of this run.
        """
        state = error = None
        try:
            state = self._read()
        except UserError as found:
            error = found
        key = state and [state["run"]["position"]["step_count"], state["run"]["id"]]
        finds = ranks.gather_objects((error, key, ranks.this_machine()))
        if failed := [(error, machine) for error, _, machine in finds if error]:
            error, machine = failed[0]
            raise error if len(failed) == len(finds) else UserError(f"{machine}: {error}")
        keys = [key for _, key, _ in finds]
        if not any(keys):
            return None
        newest = max(key for key in keys if key)
        if any(key != newest for key in keys):  # another machine's disk
            state = ranks.from_rank(keys.index(newest), lambda: state)
        self._load(state)
        return state["run"]["position"]

    def _load(self, state):
        run, rank = state["run"], ranks.rank()
        same = run["world_size"] == ranks.world_size()
        own = run["own"][rank % run["world_size"]]
        for name, one in self.named.items():
            try:
                if isinstance(one, torch.Generator) and not same:
                    one.manual_seed(seed_of(run["settings"]["--seed"], run["position"]["step_count"], rank))
                else:
                    set_state(one, own["states"].get(name, state[name]))
            except Exception as error:  # of whatever class it is
                raise UserError(f"--snapshot {self.path}: {name} does not load its state: {describe(error)}") from None
        if same:
            set_random_states(own["random"], self.wrapped)
        else:
            seed(run["settings"]["--seed"], run["position"]["step_count"])

    def save(self, position):
        """Copy what a snapshot holds, and let a thread of rank 0 write it while the training goes on; see `finish`.

        `position`: where the run is, a dict of numbers, among them "step_count". Waits until the snapshot before is
        written. Raises what `finish` does, and `RunError` where a weight is not finite.
        """
        large = (nn.Module, Optimizer)
        states = {name: get_state(one) for name, one in self.named.items() if not isinstance(one, large)}
        small = {name: state for name, state in states.items() if size_of(state) <= SMALL}
        own = {"random": random_states(self.wrapped), "states": copied(small, {})}
        bad = self._not_finite() if self.sharded or ranks.rank() == 0 else None
        found = ranks.gather_objects((own, bad), everywhere=False)
        ranks.from_rank(0, lambda: self._may_save(position, [bad for _, bad in found if bad]))
        if self.sharded or ranks.rank() == 0:
            copies = {} if ranks.rank() == 0 else None
            states |= {name: get_state(one) for name, one in self.named.items() if name not in states}
            state = {name: copied(states[name], copies) for name in self.named}
        if ranks.rank() == 0:
            state["run"] = {
                "position": position,
                "settings": self.settings,
                "own": [own for own, _ in found],
                "world_size": ranks.world_size(),
                "torch": str(torch.__version__),
                "id": secrets.token_hex(8),
            }
            self.writing = self.thread.submit(self._write, state)

    def finish(self):
        """Wait until the last snapshot is on disk.

        Raises `RunError` on all ranks where it could not be written; the snapshot before is untouched then.
        """
        ranks.from_rank(0, self._wait)

    def failed(self):
        """Whether this rank knows already that `finish` will raise."""
        return self.writing is not None and self.writing.done() and self.writing.exception() is not None

    def _wait(self):
        if self.writing:
            self.writing.result()

    def _may_save(self, position, bad):
        self._wait()
        if bad:
            raise RunError(
                f"{bad[0]} is not finite after step {position['step_count']}, which is not saved: lower --lr, or try "
                "--clip 1; the snapshot before, if any, is untouched"
            )

    def _not_finite(self):
        for name, parameter in self.named["model"].named_parameters():
            values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            # The sum is fast, and not finite where a number is not, but also where it overflows.
            if not values.sum().isfinite() and not values.isfinite().all():
                return name

    def _check_kind(self):
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise UserError(f"--snapshot {self.path} is a directory, a link or a device: give the path of a file")

    def _check_place(self):
        try:
            self._check_kind()
            self.temporary.unlink(missing_ok=True)  # of a run that was killed while it saved
            with self.temporary.open("xb"):
                pass
            self.temporary.unlink()
        except OSError as error:
            raise UserError(f"--snapshot {self.path}: cannot write there: {error.strerror}") from None

    def _read(self):
        """What is at the path, or None. Raises `UserError` where it is no snapshot, or another run's."""
        previous = self.previous.exists()
        way_out = f"`mv {self.previous} {self.path}` to go on from the one before it" if previous else ""
        self._check_kind()
        if not self.path.exists():
            if previous:
                raise UserError(
                    f"--snapshot {self.path} is missing but {self.previous} is there: {way_out}, or move that away as "
                    "well to start anew"
                )
            return None
        way_out = f"move it away to start anew{way_out and ', or '}{way_out}"
        try:
            # torch does not look at the checksums that it writes. One process of a machine looks at all of the file.
            with zipfile.ZipFile(self.path) as file:
                if not any(name.endswith("/data.pkl") for name in file.namelist()):
                    raise ValueError("torch has not written it")
                if process.local_rank == 0 and (damaged := file.testzip()):
                    raise ValueError(f"{damaged} in it is damaged")
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(state, dict) or not {"settings", "position", "own"} <= dict(state.get("run", {})).keys():
                raise ValueError("torch reads it, but it is no snapshot of this kit")
            difference = self._difference(state)
        except Exception as error:  # whatever a foreign file brings about
            raise UserError(f"--snapshot {self.path} cannot be read: {_cause(error)}; {way_out}") from None
        if difference:
            raise UserError(
                f"--snapshot {self.path} {difference}: change that back, or give another path to start anew"
            )
        return state

    def _difference(self, state):
        """What makes a loaded snapshot another run's, or None."""
        saved = state["run"]["settings"]
        for name in [*self.settings, *saved]:
            there, here = (settings.get(name, "absent") for settings in (saved, self.settings))
            if there != here and str(there) != str(here):  # nan is not nan, and 0 is 0.0
                return f"is of a run with {name} {there}, this run has {here}"
        for title, one in self.named.items():
            saved, mine = (state[title], one.state_dict()) if isinstance(one, nn.Module) else ({}, {})
            for name in [*mine, *saved]:
                if (there := _describe(saved, name)) != (here := _describe(mine, name)):
                    return f"is of another {title}: {name} is {there} there, {here} in this run"
        return None

    def _write(self, state):
        try:
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
            if hasattr(os, "O_DIRECTORY"):  # not on Windows
                directory = os.open(self.path.parent, os.O_DIRECTORY)
                os.fsync(directory)
                os.close(directory)
        except Exception as error:  # a full disk is a RuntimeError to torch, and what is named may be of any class
            self.temporary.unlink(missing_ok=True)
            start, kept = f"--snapshot {self.path} of step {state['run']['position']['step_count']}", "untouched"
            if not isinstance(error, OSError) and (found := refused(state)):
                raise UserError(f"{start} was not written: {found}") from None
            raise RunError(
                f"{start} was not written: {_cause(error)}; the snapshot before it, if any, is {kept}"
            ) from None


def _cause(error):
    """An exception in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pickle.UnpicklingError) and (code := re.search(r"GLOBAL (\S+)", str(error))):
        return f"it holds code, {code[1]}, which is not run"
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def _describe(state, name):
    """The shape and dtype of a tensor in a state; of anything else only whether it is there."""
    value = state.get(name, "absent")
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype}".replace("torch.", "")
    return value if name not in state else "no tensor"


def refused(state):
    """Which of the states torch would not read again, and why, in words; None where it reads all."""
    for name, one in state.items():
        buffer = io.BytesIO()
        try:
            torch.save(one, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # of any class
            return (
                f"torch does not load {name} with weights_only=True, {_cause(error)}: keep plain numbers, strings, "
                "lists, dicts and tensors there"
            )
    return None


# -------------------------------------------------------------------------------------------------- states


def has_state(one):
    return isinstance(one, (dict, torch.Generator)) or all(
        callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")
    )


def get_state(one):
    """The state of a named object: a dict is its own, a `torch.Generator` has `get_state`."""
    if isinstance(one, dict):
        return dict(one)
    return one.get_state() if isinstance(one, torch.Generator) else one.state_dict()


def set_state(one, state):
    """Load what `get_state` returned, which may lie in a file that is mapped into memory."""
    if isinstance(one, nn.Module):
        mine = one.state_dict()
        one.load_state_dict({name: sharded_like(mine.get(name), value) for name, value in state.items()})
        return
    state = copy.deepcopy(state)  # load_state_dict keeps the tensors that it is given
    if isinstance(one, Optimizer):
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            for name, value in values.items():
                values[name] = sharded_like(parameters[index], value)
    if isinstance(one, dict):
        one.clear()
        one.update(state)
    else:
        one.set_state(state) if isinstance(one, torch.Generator) else one.load_state_dict(state)


def sharded_like(mine, value):
    """A whole tensor, sharded over the ranks where `mine` is; anything else as it is."""
    if not hasattr(mine, "full_tensor") or not isinstance(value, torch.Tensor) or value.shape != mine.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # takes long to import

    return distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)


def copied(value, copies):
    """A nested state with its tensors gathered and copied to the CPU, the same memory once. copies: {} to begin with;
    None on a rank that only takes part in the gathering.

    NumPy's float64, whole numbers and strings become Python's, which `weights_only` reads again.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
            return value if copies is None else value.detach().to("cpu", copy=True)
        if copies is None:
            return value
        key = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        same = copy.copy(value)  # an OrderedDict may have attributes
        same.clear()
        same.update((copied(key, copies), copied(item, copies)) for key, item in value.items())
        return same
    if type(value) in (list, tuple):
        return type(value)(copied(item, copies) for item in value)
    if isinstance(value, (numpy.float64, numpy.integer, numpy.bool_, numpy.str_)):
        return value.item()
    return value


def size_of(value):
    """Bytes of the tensors in a nested state."""
    if isinstance(value, (dict, list, tuple)):
        return sum(map(size_of, value.values() if isinstance(value, dict) else value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def hyperparameters(named):
    """{words: plain value} of what the script gave optimizers and schedules, which loading would override."""
    found = {}
    for name, one in named.items():
        if isinstance(one, (LRScheduler, Optimizer)):
            found[f"{name}'s class"] = type(one).__name__
        if isinstance(one, LRScheduler):
            found |= {f"{name}'s {key}": plain(value) for key, value in one.state_dict().items() if key != "_last_lr"}
        if isinstance(one, Optimizer):
            for number, group in enumerate(one.param_groups):
                rate = "lr" if "initial_lr" not in group else "initial_lr"  # the schedule has changed lr
                for key, value in group.items():
                    if key in ("params", "foreach", "fused", "capturable", "param_names") or key == "lr" != rate:
                        continue
                    of_group = f" of group {number}" if len(one.param_groups) > 1 else ""
                    found[f"{name}'s {key}{of_group}"] = plain(value)
    return found


def plain(value):
    """A value in types that can be saved and compared."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if key != "_last_lr"}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (torch.Tensor, numpy.ndarray, numpy.generic)):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def devices(model):
    """The devices on which this process trains, the outputs' among them."""
    found = {parameter.device for parameter in model.parameters()}
    if isinstance(model, nn.DataParallel):
        found |= {torch.device(next(iter(found)).type, index) for index in model.device_ids}
    return sorted(found, key=str)


def seed_of(*numbers):
    return hash(numbers) % 2**63


def seed(*numbers):
    """Seed what is random on this rank, differently on each. Numbers: whole, the run's own seed first."""
    number = seed_of(*numbers, ranks.rank())
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def random_states(model):
    """The states of this rank's random generators, in plain types."""
    name, key, *rest = numpy.random.get_state()
    accelerators = [device for device in devices(model) if device.type != "cpu"]
    return {
        "python": random.getstate(),
        "numpy": [name, key.tolist(), *rest],
        "cpu": torch.get_rng_state(),
        "devices": [torch.get_device_module(device).get_rng_state(device) for device in accelerators],
    }


def set_random_states(states, model):
    """Set what `random_states` returned; the devices' where there are as many."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    accelerators = [device for device in devices(model) if device.type != "cpu"]
    if len(accelerators) == len(states["devices"]):
        for device, state in zip(accelerators, states["devices"], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

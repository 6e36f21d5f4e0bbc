"""Saving and resuming: a snapshot is whole or absent, and a run resumed from it ends as if it never stopped."""

import copy
import os
import pickle
import random
import re
import secrets
import shutil
import stat
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from torch import nn

from common import group
from common.launch import RunError, UserError, finish_first

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)  # what `weights_only` lets through


class Snapshots:
    """The newest snapshot of a run, at `args.snapshot`, and the one before it, at `args.snapshot`.prev.

    A snapshot is a dict of CPU tensors and plain types: "model", as the bare model names it, "optimizer", "scaler",
    "random" (the random states of each rank), "settings" (what makes a run this run and no other), "position" (what
    `save` was given), "world_size", "torch" (its version) and "id". All ranks call
    `resume`, `save` and `finish` together.
    """

    def __init__(self, args, model, optimizer, scaler, data_size):
        """Raises `UserError` where rank 0 could not write a snapshot."""
        self.path = args.snapshot
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.previous = self.path.with_name(f"{self.path.name}.prev")
        self.temporary = self.path.with_name(f"{self.path.name}.tmp")
        self.settings = {
            "--seed": args.seed,
            "--batch-size": args.batch_size,
            "--lr": args.lr,
            "--shuffle": args.shuffle,
            "size of the train set": data_size,
            "optimizer": type(optimizer).__name__,
        }
        self.thread, self.writing = ThreadPoolExecutor(1), None
        finish_first.append(self.finish)  # also where the loop over the epochs was left before its end
        group.from_rank(0, self._check_place)

    def resume(self):
        """Load the newest snapshot that any rank finds at the path into model, optimizer, scaler and random states.

        Returns its position, or None where there is no snapshot. Raises `UserError` on all ranks, with nothing loaded,
        where a rank finds something that is no snapshot of this run.
        """
        state = error = None
        try:
            state = self._read()
        except UserError as found:
            error = found
        finds = group.gather_objects((error, state and [state["position"]["step_count"], state["id"]]))
        for error, _ in finds:
            if error:
                raise error
        keys = [key for _, key in finds]
        if not any(keys):
            return None
        newest = max(key for key in keys if key)
        if any(key != newest for key in keys):  # another machine's disk
            state = group.from_rank(keys.index(newest), lambda: state)

        names = {plain: name for name, plain in plain_names(self.model).items()}
        # Of the optimizer's tensors load_state_dict keeps those it is given, and these lie in the file.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.model.load_state_dict({names[plain]: value for plain, value in state["model"].items()})
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if state["world_size"] == group.world_size():
            set_random_states(state["random"][group.rank()], self.model)
        else:
            seed(state["settings"]["--seed"], state["position"]["step_count"])
        return state["position"]

    def save(self, position):
        """Copy what a snapshot holds, and let a thread of rank 0 write it while the training goes on; see `finish`.

        `position`: where the run is, a dict of numbers, among them "step_count". Waits until the snapshot before is
        written. Raises what `finish` does.
        """
        states = group.gather_objects(random_states(self.model), everywhere=False)
        group.from_rank(0, lambda: self._begin(position, states))

    def finish(self):
        """Wait until the last snapshot is on disk.

        Raises `RunError` on all ranks where it could not be written; the snapshot before is untouched then.
        """
        group.from_rank(0, self._wait)

    def failed(self):
        """Whether this rank knows already that `finish` will raise."""
        return self.writing is not None and self.writing.done() and self.writing.exception() is not None

    def _wait(self):
        if self.writing:
            self.writing.result()

    def _begin(self, position, states):
        self._wait()
        self._check_finite(position)
        self.writing = self.thread.submit(self._write, position, self._copy(position, states))

    def _check_finite(self, position):
        for name, parameter in self.model.named_parameters():
            # The sum is fast, and not finite where a number is not, but also where it overflows.
            if not parameter.sum().isfinite() and not parameter.isfinite().all():
                raise RunError(
                    f"{name} is not finite after step {position['step_count']}, which is not saved: lower --lr, or try "
                    "--clip 1; the snapshot before, if any, is untouched"
                )

    def _check_place(self):
        for path in (self.temporary, self.previous):
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise UserError(f"--snapshot {self.path} writes to {path} too, which is no regular file: move it away")
        try:
            self.temporary.unlink(missing_ok=True)  # of a run that was killed while it saved
            with self.temporary.open("xb"):
                pass
            self.temporary.unlink()
        except OSError as error:
            raise UserError(f"--snapshot {self.path}: cannot write there: {error.strerror}") from None
        size = sum(value.nbytes for value in self.model.state_dict().values() if isinstance(value, torch.Tensor))
        free = shutil.disk_usage(self.path.parent).free
        if free < size:
            raise UserError(f"--snapshot {self.path}: the model has {size:,} bytes, its disk has {free:,} left")

    def _read(self):
        """What is at the path, or None. Raises `UserError` where it is no snapshot, or another run's."""
        previous = self.previous.exists()
        way_out = f"`mv {self.previous} {self.path}` to go on from the one before it" if previous else ""
        try:
            kind = self.path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if previous:
                raise UserError(
                    f"--snapshot {self.path} is missing but {self.previous} is there: {way_out}, or move that away as "
                    "well to start anew"
                ) from None
            return None
        if not stat.S_ISREG(kind):
            raise UserError(f"--snapshot {self.path} is a directory, a link or a device: give the path of a file")
        way_out = f"move it away to start anew{way_out and ', or '}{way_out}"
        try:
            # torch does not look at the checksums that it writes. One process of a machine looks at all of the file.
            if group.local_rank() == 0 and (damaged := zipfile.ZipFile(self.path).testzip()):
                raise ValueError(f"{damaged} in it is damaged")
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            difference = self._difference(state)
        except Exception as error:  # whatever a foreign file brings about
            raise UserError(f"--snapshot {self.path} cannot be read: {_cause(error)}; {way_out}") from None
        if difference:
            raise UserError(
                f"--snapshot {self.path} {difference}: change that back, or give another path to start anew"
            )
        return state

    def _difference(self, state):
        """What makes a loaded snapshot another run's, or None. Raises `ValueError` where it is no snapshot."""
        if not isinstance(state, dict) or not {"settings", "position", "random", "id"} <= state.keys():
            raise ValueError("torch reads it, but it is no snapshot of this kit")
        for name, mine in self.settings.items():
            if (saved := state["settings"].get(name)) != mine:
                return f"is of a run with {name} {saved}, this run has {mine}"
        saved, mine = state["model"], plain_state(self.model)
        for name in [*mine, *saved]:
            if (there := _describe(saved, name)) != (here := _describe(mine, name)):
                return f"is of another model: {name} is {there} there, {here} in this run"
        groups = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
        if groups != (here := [len(group["params"]) for group in self.optimizer.param_groups]):
            return f"is of a run whose optimizer has groups of {groups} parameters, in this run of {here}"
        return None

    def _copy(self, position, states):
        return copied(
            {
                "model": plain_state(self.model),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "random": states,
                "settings": self.settings,
                "position": position,
                "world_size": group.world_size(),
                "torch": str(torch.__version__),
                "id": secrets.token_hex(8),
            },
            {},
        )

    def _write(self, position, state):
        try:
            with self.temporary.open("xb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if self.path.exists():
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
        except (OSError, RuntimeError) as error:  # a full disk is a RuntimeError to torch
            self.temporary.unlink(missing_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            raise RunError(
                f"--snapshot {self.path} of step {position['step_count']} was not written: {_cause(error)}; its disk "
                f"has {free:,} bytes left; the snapshot before it, if any, is untouched"
            ) from None


def _cause(error):
    """An exception in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pickle.UnpicklingError) and (code := re.search(r"GLOBAL (\S+)", str(error))):
        return f"it holds code, {code[1]}, which is not run"
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def _describe(state, name):
    value = state.get(name, "absent")
    return f"{list(value.shape)} {value.dtype}".replace("torch.", "") if isinstance(value, torch.Tensor) else value


# -------------------------------------------------------------------------------------------------- states


def plain_names(model):
    """{name in `state_dict`: name in that of the bare model}: without DDP, DataParallel and torch.compile around it or
    around modules inside."""
    inner = []
    for name, module in model.named_modules(remove_duplicate=False):
        wrapper = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        for child in ["module"] if wrapper else ["_orig_mod"] if "_orig_mod" in module._modules else []:
            inner.append((f"{name}." if name else "", f"{name}.{child}." if name else f"{child}."))
    names = {}
    for name in model.state_dict():
        names[name] = name
        for outside, inside in reversed(inner):  # the deepest first
            if name.startswith(inside):
                names[name] = outside + names[name].removeprefix(inside)
    return names


def plain_state(model):
    """The model's `state_dict` by `plain_names`."""
    state = model.state_dict()
    return {plain: state[name] for name, plain in plain_names(model).items()}


def tensors(value):
    """The tensors in a nested value, one after the other."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def copied(value, copies):
    """A nested state with its tensors copied to the CPU, the same memory once. copies: {} to begin with.

    Raises `RunError` for what `weights_only` would not read again.
    """
    if isinstance(value, torch.Tensor):
        key = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        return {key: copied(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item, copies) for item in value)
    if not isinstance(value, PLAIN):
        raise RunError(f"a snapshot cannot hold a {type(value).__module__}.{type(value).__name__}, only plain types")
    return value


def devices(model):
    """The devices on which this process trains, the outputs' among them."""
    found = {parameter.device for parameter in model.parameters()}
    if isinstance(model, nn.DataParallel):
        found |= {torch.device(next(iter(found)).type, index) for index in model.device_ids}
    return sorted(found, key=str)


def seed(*numbers):
    """Seed what is random on this rank, differently on each. Numbers: whole, the run's own seed first."""
    number = hash((*numbers, group.rank())) % 2**63
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

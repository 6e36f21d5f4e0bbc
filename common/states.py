"""The states of what is named, and of random generators: reading, copying, describing, loading, sharding."""

import copy
import gc
import json
import random

from common import ranks
from common.errors import UserError

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_leaves


def access(one):
    """(get, set) of the state of a named object; with None among them where it has none."""
    if isinstance(one, dict):
        return lambda: dict(one), lambda state: one.clear() or one.update(state)
    if isinstance(one, torch.Generator):
        return one.get_state, one.set_state
    return getattr(one, "state_dict", None), getattr(one, "load_state_dict", None)


def check(named):
    """Raise `UserError` where a named object has no state."""
    for name, one in named.items():
        if name == "run" or not all(map(callable, access(one))):
            raise UserError(
                f"Run(…, {name}=…) is a {type(one).__name__}: what is named needs state_dict and load_state_dict, "
                "or is a dict or a torch.Generator; and no name is run"
            )


def check_all_named(named, model):
    """Raise `UserError` where an optimizer of the model, or its schedule, is not among the named."""
    kinds, weights = (LRScheduler, Optimizer), set(map(id, model.parameters()))
    known = [one for one in named if isinstance(one, kinds)]
    for one in known:  # SequentialLR and ChainedScheduler hold others, which may do so too
        known += getattr(one, "_schedulers", [])
    for one in gc.get_objects():
        if issubclass(type(one), kinds) and not any(one is other for other in known):
            groups = getattr(getattr(one, "optimizer", one), "param_groups", [])
            if any(id(value) in weights for group in groups for value in group["params"]):
                raise UserError(
                    f"the script has a {type(one).__name__} that is not named in Run, so that a snapshot would lose "
                    "it: write Run(…, name=it)"
                )


def description(named):
    """{words: plain value} of what makes a job this one: the shapes and dtypes of modules' tensors, and what the script
    gave optimizers and schedules, which loading would override.
    """
    found, ignored = {}, {"params", "param_names", "foreach", "fused", "capturable", "_last_lr"}
    for name, one in named.items():
        for key, value in one.state_dict().items() if isinstance(one, nn.Module) else []:
            if isinstance(value, torch.Tensor):
                found[f"{name}'s {key}"] = f"{list(value.shape)} {value.dtype}"
        if isinstance(one, (LRScheduler, Optimizer)):
            found[f"{name}'s class"] = type(one).__name__
            groups = one.param_groups if isinstance(one, Optimizer) else [one.state_dict()]
            for number, group in enumerate(groups):
                left_out = ignored | ({"lr"} if "initial_lr" in group else set())  # the schedule has changed lr
                of_group = f" of group {number}" if len(groups) > 1 else ""
                found |= {f"{name}'s {key}{of_group}": group[key] for key in group if key not in left_out}
    return plain(found)


def plain(value):
    """A value in the types of JSON, which can be saved and compared."""
    plain = json.dumps(value, default=lambda one: one.tolist() if hasattr(one, "tolist") else type(one).__name__)
    return json.loads(plain)


def set_state(one, state):
    """Load a state of a named object, which may lie in a file that is mapped into memory.

    Raises `UserError` where a schedule's functions, which have no state, give another rate than the one that was saved.
    """
    if isinstance(one, nn.Module):
        state, mine = copy.copy(state), one.state_dict()  # a copy that keeps the versions of the modules
        state.update({name: sharded_like(mine.get(name), value) for name, value in state.items()})
    else:
        state = copy.deepcopy(state)  # else the object would keep the file's memory
    if isinstance(one, Optimizer):
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            values.update({name: sharded_like(parameters[index], value) for name, value in values.items()})
    access(one)[1](state)
    groups = zip(one.base_lrs, one.lr_lambdas, one.get_last_lr(), strict=True) if type(one) is LambdaLR else []
    for lr, function, saved in groups:
        if not numpy.isclose(rate := lr * function(one.last_epoch), saved):
            raise UserError(
                f"the schedule gives the rate {rate:g} after {one.last_epoch} steps, that of the snapshot gave "
                f"{saved:g}: change back what it depends on, such as --epochs, or give another path to start anew"
            )


def sharded_like(mine, value):
    """A whole tensor, sharded over the ranks where `mine` is; anything else as it is."""
    if not hasattr(mine, "full_tensor") or not isinstance(value, torch.Tensor) or value.shape != mine.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # takes long to import

    return distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)


def is_own(one, state):
    """Whether each rank's state of a named object is saved, and not rank 0's for all: that of a small other object."""
    size = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(state))  # of tensors
    return size <= 2**16 and not isinstance(one, (nn.Module, Optimizer))


def copied(state, keep=True):
    """A nested state with its tensors gathered and copied to the CPU, the same memory once.

    NumPy's float64, whole numbers and strings become Python's, which `weights_only` reads again. Where not `keep`, this
    rank only takes part in the gathering, and gets None.
    """
    new, copies = {}, {}  # new: {id of a leaf: what takes its place}
    leaves = tree_leaves(state)  # kept, so that no other object gets one of their ids
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            whole = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
            key = (leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) if whole is leaf else id(leaf)
            if keep and key not in copies:
                copies[key] = whole.detach().to("cpu", copy=True)
            new[id(leaf)] = copies.get(key)
        elif isinstance(leaf, (numpy.float64, numpy.integer, numpy.bool_, numpy.str_)):
            new[id(leaf)] = leaf.item()
    return copy.deepcopy(state, new) if keep else None


def devices(model):
    """The accelerators on which this process trains, the outputs' among them."""
    found = {parameter.device for parameter in model.parameters()}
    if isinstance(model, nn.DataParallel):
        found |= {torch.device(next(iter(found)).type, index) for index in model.device_ids}
    return sorted((device for device in found if device.type != "cpu"), key=str)


def seed(*numbers):
    """Seed what is random on this rank, differently on each. Numbers: whole, the run's own seed first."""
    number = hash((*numbers, ranks.rank())) % 2**63
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def get_random(model):
    """The states of this rank's random generators, in plain types."""
    return {
        "python": random.getstate(),
        "numpy": plain(numpy.random.get_state()),
        "cpu": torch.get_rng_state(),
        "devices": [torch.get_device_module(device).get_rng_state(device) for device in devices(model)],
    }


def set_random(model, state):
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    for device, one in zip(devices(model), state["devices"], strict=False):
        torch.get_device_module(device).set_rng_state(one, device)

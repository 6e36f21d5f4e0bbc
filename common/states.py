"""The states of what is named, and of random generators: reading, copying, comparing, loading, sharding."""

import copy
import json
import random

from common import ranks

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves


def access(one):
    """(get, set) of the state of a named object; with None among them where it has none."""
    if isinstance(one, dict):
        return lambda: dict(one), lambda state: one.clear() or one.update(state)
    if isinstance(one, torch.Generator):
        return one.get_state, one.set_state
    return getattr(one, "state_dict", None), getattr(one, "load_state_dict", None)


def has_state(one):
    return all(map(callable, access(one)))


def get_states(named):
    return {name: access(one)[0]() for name, one in named.items()}


def set_state(one, state):
    """Load a state of a named object, which may lie in a file that is mapped into memory."""
    if isinstance(one, nn.Module):
        mine = one.state_dict()
        state = {name: sharded_like(mine.get(name), value) for name, value in state.items()}
    else:
        state = copy.deepcopy(state)  # else the object would keep the file's memory
    if isinstance(one, Optimizer):
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        for index, values in state["state"].items():
            values.update({name: sharded_like(parameters[index], value) for name, value in values.items()})
    access(one)[1](state)


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


def hyperparameters(named):
    """{words: plain value} of what the script gave optimizers and schedules, which loading would override."""
    found, ignored = {}, {"params", "param_names", "foreach", "fused", "capturable", "_last_lr"}
    for name, one in named.items():
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
    known = json.dumps(value, default=lambda one: one.tolist() if hasattr(one, "tolist") else type(one).__name__)
    return json.loads(known, object_hook=lambda found: {key: found[key] for key in found if key != "_last_lr"})


def shapes(named, states):
    """{words: shape and dtype} of the tensors in modules' states."""
    return {
        f"{title}'s {name}": f"{list(value.shape)} {value.dtype}"
        for title, one in named.items()
        for name, value in (states.get(title, {}) if isinstance(one, nn.Module) else {}).items()
        if isinstance(value, torch.Tensor)
    }


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


def generators(model):
    """{name: (get, set)} of the states of this rank's random generators, in plain types."""
    modules = [(torch.get_device_module(device), device) for device in devices(model)]
    return {
        "python": (random.getstate, random.setstate),
        "numpy": (lambda: plain(numpy.random.get_state()), numpy.random.set_state),
        "cpu": (torch.get_rng_state, torch.set_rng_state),
        "devices": (
            lambda: [module.get_rng_state(device) for module, device in modules],
            lambda states: [one.set_rng_state(state, at) for (one, at), state in zip(modules, states, strict=False)],
        ),
    }

"""What a run does beside its loop: it hears signals, agrees once a second, looks whether all is trained and named."""

import gc
import os
import signal
import time

from common import ranks
from common.errors import UserError, stop_signals

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


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


class EachSecond:
    """An exchange among the ranks after the same steps on all of them, about one a second."""

    def __init__(self, device):
        self.device, self.interval, self.left, self.start = device, 1, 1, time.monotonic()

    def most(self, numbers):
        """To be called after each step. `numbers` returns this rank's.

        Returns the greatest of each over the ranks after the steps at which they exchange them, else [].
        """
        self.left -= 1
        if self.left:
            return []
        now = time.monotonic()
        seconds, *most = ranks.most([now - self.start, *numbers()], self.device)
        # The same on all ranks. It doubles at most, so that one fast step does not put the next exchange far off.
        self.interval = self.left = max(1, min(2 * self.interval, int(self.interval / max(seconds, 1e-9))))
        self.start = now
        return most


def check_gradients(model, wrapped):
    """Tell which parameters no gradient reaches. Raises `UserError` where DDP would wait for it."""
    names = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    line = f"no gradient reaches {ranks.few(names)}"
    if names and isinstance(wrapped, DDP) and not (wrapped.find_unused_parameters or wrapped.static_graph):
        raise UserError(
            f"{line}: use them in forward, set requires_grad=False, or give DDP find_unused_parameters=True"
        )
    if names:
        ranks.say(line)


def check_names(named, model):
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


def arrange_gradients(model):
    """Let DDP arrange the gradients now, the last parameter's first, and not after its first backward pass.

    From that on three ranks and more add them up in another order, so that a run that goes on after a resume, whose
    first backward is a later one, would differ in the last digits. With `find_unused_parameters=True` DDP keeps its
    first order. With `static_graph=True` it allows no backward but the model's own: such a run differs.
    """
    some = [one for one in model.modules() if isinstance(one, DDP)]
    for ddp in [one for one in some if not (one.find_unused_parameters or one.static_graph)]:
        ddp.reducer.prepare_for_backward([])  # as its forward pass does; torch has no public name for it
        sparse = {id(one.weight) for one in ddp.modules() if getattr(one, "sparse", False)}
        parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        for one in reversed(parameters):
            one.backward(torch.zeros_like(one, layout=torch.sparse_coo if id(one) in sparse else torch.strided))
        for one in parameters:
            one.grad = None

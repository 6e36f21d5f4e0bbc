"""What the ranks tell each other: sums, objects, checks that they agree. A process alone has rank 0 of 1.

At the end: how ranks and machines are named in a line.
"""

import ipaddress
import socket
import sys
import time

from common.errors import RunError, UserError, process

import torch
import torch.distributed as dist


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def say(line):
    """Print a line from rank 0, in one piece, so that it mixes with no other process's."""
    if rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def total(tensor):
    """The sum of a tensor over the ranks, as a new tensor."""
    tensor = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


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
        row = torch.tensor([now - self.start, *numbers()], dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(row, dist.ReduceOp.MAX)
        seconds, *greatest = row.tolist()
        # The same on all ranks. It doubles at most, so that one fast step does not put the next exchange far off.
        self.interval = self.left = max(1, min(2 * self.interval, int(self.interval / max(seconds, 1e-9))))
        self.start = now
        return greatest


def gather_objects(value, everywhere=True):
    """Every rank's value, anything that pickle takes, in a list; where not everywhere, None but on rank 0."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size() if everywhere or rank() == 0 else None
    if everywhere:
        dist.all_gather_object(values, value)
    else:
        dist.gather_object(value, values)
    return values


def from_rank(source, function):
    """Call `function` on rank `source`; every rank returns what it returned or raises the `RunError` that it raised."""
    answer = [None, None]
    if rank() == source:
        try:
            answer[0] = function()
        except RunError as error:
            answer[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(answer, source)
    if answer[1]:
        raise answer[1]
    return answer[0]


def check_same(what, value):
    """Raise `UserError` on all ranks where they have different values; it names the machines."""
    there = gather_objects((value, this_machine()))
    if found := differences(*zip(*there, strict=True)):
        raise UserError(f"{what} is {found}: it must be the same everywhere")


def differences(values, labels):
    """Which of `values` stand at which of `labels`, such as "5 at node 0 (a), 6 at node 1 (b)"; "" where all agree."""
    places = {}
    for value, name in zip(values, labels, strict=True):
        places.setdefault(value, {})[name] = ""  # in their order, each once
    if len(places) == 1:
        return ""
    return ", ".join(f"{value} at {few(names)}" for value, names in places.items())


def this_machine():
    return label(process.node, socket.gethostname())


def share_buffers(model):
    """Give every rank rank 0's buffers, such as running means, which only DDP's next forward would do."""
    for buffer in model.buffers() if dist.is_initialized() else []:
        dist.broadcast(buffer, src=0)


def check_same_weights(model):
    """Raise `RunError` where a rank's parameters differ from rank 0's; it names the ranks.

    Of parameters that are sharded (DTensors) each rank has its own part, and nothing to compare.
    """
    mine = {}
    for name, values in model.named_parameters():
        if not hasattr(values, "full_tensor"):
            values = values.detach().cpu()
            values = (torch.view_as_real(values) if values.is_complex() else values).double()
            mine[name] = torch.stack([values.clamp(min=0).sum(), values.clamp(max=0).sum()])
    first = from_rank(0, lambda: mine)
    # A sum's last digits may depend on the kind of processor; a rank that went its own way differs by far more.
    same = {name: torch.allclose(sums, first[name], 1e-12, 0, equal_nan=True) for name, sums in mine.items()}
    found = gather_objects([name for name in same if not same[name]][:1])
    if some := [rank for rank, names in enumerate(found) if names]:
        raise RunError(f"the weights of rank {few(some)} differ from those of rank 0, first in {found[some[0]][0]}")


def few(items, separator=", ", more="more"):
    """Items in words; of many the first eight, and how many there are beside them."""
    items = list(map(str, items))
    return separator.join(items[:8]) + f" and {len(items) - 8} {more}" * (len(items) > 8)


def label(node_rank, host):
    return f"node {node_rank} ({host})"


def is_loopback(host):
    """Whether a name or address leads to this machine alone."""
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback
    except OSError:  # not known, or not known yet
        return False


def is_literal_loopback(host):
    """Whether a name or address means loopback on every machine, and not where a machine's own name leads to it."""
    return host.startswith(("127.", "::1", "localhost"))

"""How machines and ranks meet over a store: who has come, who is waited for, and what they agree on."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

from common.errors import RunError, UserError, write_error
from common.ranks import few, label

import torch.distributed as dist

MACHINES = "ddp_multinode.sh"  # what "launches" the agents that meet as ranks do, one on each machine
PAUSE = 5  # seconds between two lines that say what is waited for


class Waiting:
    """Says every few seconds what is waited for, once on each machine; raises `RunError` when the time is over."""

    def __init__(self, timeout, ranks, grace=0):
        self.timeout, self.grace, self.speaks = timeout, grace, ranks.local_rank == 0
        self.start, self.told = time.monotonic(), 1 - PAUSE  # the first line comes soon

    def tell(self, what):
        passed = time.monotonic() - self.start
        if passed > self.timeout + self.grace:
            raise RunError(f"waited {passed:.0f} s in vain for {what}")
        if self.speaks and passed > self.told + PAUSE:
            self.told = passed
            sys.stderr.write(f"waiting for {what} ({passed:.0f} of {self.timeout:g} s)\n")


def meet(store, host, ranks, args):
    """Wait until all ranks have come to the store, see that their machines are alike, and choose gloo's interface.

    Returns the address by which the others reach this machine, or None where it is not known. Raises on all ranks
    `RunError` where some do not come, or machines do not reach each other; `UserError` where the machines differ.
    """
    if ranks.one_machine:
        if ranks.world_size > 1:
            exchange(store, "meeting", ranks, {}, args.timeout)
        return "127.0.0.1"
    from common import network  # not needed on one machine

    mine = network.describe(args, host)
    verdict = exchange(store, "meeting", ranks, mine, args.timeout, network.judge)
    address, error = network.connect(store, ranks, mine["address"], verdict)
    exchange(store, "connection", ranks, {"error": error}, args.timeout)
    return address


def exchange(store, name, ranks, mine, timeout, judge=lambda there: {}):
    """Let rank 0 judge what each rank says, the dict `mine`, and return the verdict, a dict, on all ranks.

    judge: gives it for the list of what all said, or raises `RunError` or `UserError`, which all ranks raise then. So
    they do where one has an "error" to say, does not come within `timeout` seconds, or contradicts others.
    """
    store = dist.PrefixStore(name, store)
    for own in ("rank", "local_rank", "node", "world_size", "local_world_size"):
        mine = mine | {own: getattr(ranks, own)}
    mine |= {"host": socket.gethostname(), "place": store.add("arrivals", 1)}
    store.set(f"arrival {mine['place']}", json.dumps(mine))
    try:
        if ranks.rank == 0:
            try:
                verdict = _judge(store, ranks, timeout, judge) | {"error": ""}
            except RunError as error:
                verdict = {"error": str(error), "mistake": isinstance(error, UserError)}
                verdict["came"] = store.add("arrivals", 0)
            store.set("verdict", json.dumps(verdict))
        waiting = Waiting(timeout, ranks, grace=10)
        while not comes(store, ["verdict"], PAUSE):
            waiting.tell(store.get("waiting").decode() if store.check(["waiting"]) else "rank 0")
        verdict = json.loads(store.get("verdict"))
        if store.add("read", 1) == verdict["came"]:
            store.set("all read", "")
        if verdict["error"] and ranks.rank == 0:  # who may serve the store
            comes(store, ["all read"], 3)
    except dist.DistError as error:
        raise RunError(f"rank 0 does not answer any more: {str(error).partition(chr(10))[0]}") from None
    if line := verdict["error"]:
        raise UserError(line) if verdict["mistake"] else RunError(line)
    if mine["place"] > verdict["came"] or mine["place"] in verdict["replaced"]:
        raise UserError(f"rank {ranks.rank} on {mine['host']} came twice: is its rank given to another one too?")
    return verdict


def comes(store, keys, seconds):
    """Whether the keys come to a store within this time."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:  # a store in a file has no other one for it
        if "timeout" not in str(error).partition("\n")[0].lower():
            raise
        return False
    return True


@contextmanager
def deadline(seconds, line):
    """End this process with a line where what stands in this context takes longer: torch may wait for ever."""

    def give_up():
        write_error(line)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _judge(store, ranks, timeout, judge):
    """Rank 0: wait for all; returns the verdict, with the number of those that "came" and the places "replaced"."""
    there, came, claims, replaced, waiting = {}, 0, {}, [], Waiting(timeout, ranks)
    while missing := set(range(ranks.world_size)) - set(there):
        comes(store, [f"arrival {came + number + 1}" for number in range(len(missing))], 0.5)
        keys = [f"arrival {place}" for place in range(came + 1, store.add("arrivals", 0) + 1)]
        came += len(keys)
        for mine in map(json.loads, store.multi_get(keys) if keys else []):
            _refuse_contradiction(mine, claims, ranks.launcher == MACHINES)
            replaced += [there[mine["rank"]]["place"]] if mine["rank"] in there else []
            there[mine["rank"]] = mine
        if missing := missing - set(there):
            what = f"{name_ranks(missing, there.values())}; here is {name_ranks(there, there.values())}"
            store.set("waiting", what)
            waiting.tell(what)
    there = [there[rank] for rank in range(ranks.world_size)]
    if error := next((mine["error"] for mine in there if mine.get("error")), ""):
        raise RunError(error)
    return judge(there) | {"came": came, "replaced": replaced}


def _refuse_contradiction(mine, claims, machines):
    """Raise `UserError` where a rank contradicts one that came before. claims: what they said; begins as {}."""
    who, size, here = f"rank {mine['rank']} on {mine['host']}", mine["local_world_size"], (mine["host"], mine["node"])
    rank, world_size, itself = "RANK", "WORLD_SIZE", mine["place"]
    if machines:  # one may come again: its script was ended and started anew
        rank, world_size, itself = "--node-rank", "--nnodes", mine["host"]
    own, same = "give each its own", "set the same for both"
    for name, of, value, shown, cure in [
        (rank, mine["rank"], itself, mine["rank"], own),
        ("LOCAL_RANK", (here, mine["local_rank"]), itself, mine["local_rank"], own),
        (world_size, None, mine["world_size"], mine["world_size"], same),
        ("LOCAL_WORLD_SIZE", None, size == mine["world_size"], size, same),
        ("LOCAL_WORLD_SIZE", here, size, size, same),
    ]:
        claim, there, other = claims.setdefault((name, of), (value, shown, who))
        if claim != value:
            raise UserError(f"{name} is {there} for {other} and {shown} for {who}: {cure}")


def name_ranks(ranks, there):
    """The ranks by node and local rank, as those that are there let it be known; a node of which all are by itself."""
    each, names, nodes = next(iter(there))["local_world_size"], {}, {}
    for mine in there:
        first, size = mine["rank"] - mine["local_rank"], mine["local_world_size"]
        names |= {first + number: (label(mine["node"], mine["host"]), number, size) for number in range(size)}
    for rank in sorted(ranks):
        name, local_rank, processes = names.get(rank, (f"node {rank // each}", rank % each, each))
        nodes.setdefault((name, processes), []).append(local_rank)
    parts = [name + f" local rank {few(some)}" * (len(some) < size) for (name, size), some in nodes.items()]
    return few(parts, "; ", "nodes more")

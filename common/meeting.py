"""How the ranks meet: the store through which they find each other, and who has come."""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from urllib.parse import urlsplit

from common.errors import RunError, UserError
from common.waiting import Waiting, is_literal_loopback, label, listen, stay

import torch.distributed as dist


def open_store(ranks, init_method, timeout):
    """(the store through which the ranks find each other, the host that serves it or None).

    Raises `UserError` where rank 0 cannot listen on the port it was given, `RunError` where it cannot be reached.
    """
    url = urlsplit(init_method)
    if ranks.launcher is None:
        return dist.HashStore(), None  # alone: no port is needed
    if url.scheme == "file":
        return next(dist.rendezvous(init_method, ranks.rank, ranks.world_size))[0], None
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = ranks.serves_store
    if served and not ranks.one_machine and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        # After a restart the ranks would find in it where those of the attempt before were.
        raise UserError(
            "--max-restarts on several machines: start by ddp_multinode.sh --elastic, or give torchrun "
            "--rdzv-backend=c10d and the environment TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    serve = ranks.rank == 0 and not served
    options = {}
    if serve and sys.platform != "win32":
        try:  # torch's own socket would listen on all addresses, even where the host is loopback
            listener = listen(host if ranks.one_machine or is_literal_loopback(host) else "", port)
        except OSError as error:
            raise UserError(
                f"rank 0 cannot listen on {host}, port {port} ({os.strerror(error.errno)}): choose another port by "
                "MASTER_PORT, torchrun's --master_port or --init-method"
            ) from None
        options = dict(master_listen_fd=listener.detach(), use_libuv=False)  # torch 2.6 does not answer with libuv
    # A launcher serves its store before it starts a rank: where it does not answer soon, it was killed meanwhile.
    patience = min(timeout, timedelta(seconds=30)) if served else timeout
    try:
        tcp = dist.TCPStore(host, port, ranks.world_size, serve, patience, **options)
        tcp.set_timeout(timeout)
    except dist.DistError as error:
        raise RunError(f"rank {ranks.rank} cannot reach rank 0 at {host}, port {port}: {_first_line(error)}") from None
    if served:
        tcp = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", tcp)
    return tcp, host


def _first_line(error):
    return str(error).partition("\n")[0]


def meet(store, host, ranks, args):
    """Wait until all ranks have come to the store, see that their machines are alike, and choose gloo's interface.

    Returns the address by which the others reach this machine, or None where it is not known. Raises on all ranks
    `RunError` where some do not come, or machines do not reach each other; `UserError` where the machines differ.
    """
    if ranks.world_size == 1:
        return "127.0.0.1"
    if ranks.one_machine:
        exchange(store, "meeting", ranks, {}, args.timeout)
        return "127.0.0.1"
    from common import network  # not needed on one machine

    mine = network.describe(args, host)
    verdict = exchange(store, "meeting", ranks, mine, args.timeout, network.judge, UserError)
    address, error = network.connect(store, ranks, mine["address"], verdict)
    exchange(store, "connection", ranks, {"error": error}, args.timeout)
    return address


def first_error(there):
    return {"error": next((mine["error"] for mine in there if mine.get("error")), "")}


def exchange(store, name, ranks, mine, timeout, judge=first_error, error=RunError):
    """Let rank 0 judge what each rank says, the dict `mine`, and return the verdict on all ranks.

    judge: gives a dict for the list of what all said. Raises `error` on all ranks where its "error" is not "", and
    `RunError` where some rank does not come within `timeout` seconds; it names them.
    """
    store = dist.PrefixStore(name, store)
    mine = mine | {"node": ranks.node, "host": socket.gethostname(), "processes": ranks.local_world_size}
    mine |= {"rank": ranks.rank, "local_rank": ranks.local_rank, "world_size": ranks.world_size}
    mine["first_rank"] = ranks.rank - ranks.local_rank
    place = store.add("arrivals", 1)
    store.set(f"arrival {place}", json.dumps(mine))
    if ranks.rank == 0:
        verdict = _judge(store, ranks, timeout, judge)
        store.set("verdict", json.dumps(verdict))
    else:
        verdict = _wait_for_verdict(store, timeout)
    store.add("read", 1)
    if verdict["error"]:
        stay(store, "read", verdict["came"], ranks)
        raise {"late": RunError, "mistake": UserError}.get(verdict.get("kind"), error)(verdict["error"])
    if place > verdict["came"]:
        raise UserError(
            f"rank {ranks.rank} on {mine['host']} came after all {ranks.world_size}: is a RANK given twice?"
        )
    return verdict


def _judge(store, ranks, timeout, judge):
    """Rank 0: wait for all; returns the verdict, with the number of those that "came"."""
    there, came, claims, what, looked = {}, 0, {}, "", 0
    waiting = Waiting(timeout, RunError)
    try:
        while len(there) < ranks.world_size:
            if (arrived := store.add("arrivals", 0)) > came:
                keys = [f"arrival {place}" for place in range(came + 1, arrived + 1)]
                came = arrived
                for mine in map(json.loads, store.multi_get(keys)):
                    if line := _contradiction(mine, claims):
                        return {"error": line, "kind": "mistake", "came": came}
                    there[mine["rank"]] = mine
            elif time.monotonic() > looked + 0.5:
                what, looked = name_ranks(set(range(ranks.world_size)) - set(there), there.values()), time.monotonic()
            else:
                waiting.tell(what)
                time.sleep(0.01)
    except RunError as late:
        return {"error": str(late), "kind": "late", "came": came}
    return judge([there[rank] for rank in range(ranks.world_size)]) | {"came": came}


def _contradiction(mine, claims):
    """In what a rank contradicts one that came before, in one line, or "". claims: what they said; begins as {}."""
    who, size, machine = f"rank {mine['rank']} on {mine['host']}", mine["processes"], (mine["host"], mine["node"])
    for name, of in [("RANK", mine["rank"]), ("LOCAL_RANK", (*machine, mine["local_rank"]))]:
        if (other := claims.setdefault((name, of), who)) is not who:  # though it may read the same
            return f"{other} and {who} have the same {name}: give each process its own"
    all_here = size == mine["world_size"]
    for name, of, value, shown in [
        ("WORLD_SIZE", None, mine["world_size"], mine["world_size"]),
        ("LOCAL_WORLD_SIZE", None, all_here, size),
        ("LOCAL_WORLD_SIZE", machine, size, size),
    ]:
        claim, there, other = claims.setdefault((name, of), (value, shown, who))
        if claim != value:
            return f"{name} is {there} for {other} and {shown} for {who}: set the same for both"
    return ""


def _wait_for_verdict(store, timeout):
    try:
        store.wait(["verdict"], timedelta(seconds=timeout + 10))
        return json.loads(store.get("verdict"))
    except dist.DistError as error:
        raise RunError(f"rank 0 did not come, or does not answer any more: {_first_line(error)}") from None


def name_ranks(ranks, there):
    """The ranks by node and local rank, as those that are there let it be known."""
    nodes = {}
    for rank in sorted(ranks):
        places = [mine for mine in there if mine["first_rank"] <= rank < mine["first_rank"] + mine["processes"]]
        each = next(iter(there))["processes"]
        name = label(places[0]["node"], places[0]["host"]) if places else f"node {rank // each}"
        nodes.setdefault(name, []).append(rank - places[0]["first_rank"] if places else rank % each)
    names = [f"{name} local rank {', '.join(map(str, local_ranks))}" for name, local_ranks in nodes.items()]
    return "; ".join(names[:8]) + f"; and {len(names) - 8} nodes more" * (len(names) > 8)

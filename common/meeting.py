"""How the ranks meet: the store through which they find each other, who has come, and whether all are alike."""

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from common import machines
from common.errors import RunError, UserError
from common.ranks import differences, label, node

# What may differ from process to process.
OWN_ARGUMENTS = ("local_rank", "threads", "init_method")
OWN_PATHS = ("snapshot", "metrics", "tensorboard")


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
    # torchrun serves the store that it announces in the environment itself.
    served = url.scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if served and not ranks.one_machine and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        # After a restart the ranks would find in it where those of the attempt before were.
        raise UserError(
            "--max-restarts on several machines: start by ddp_multinode.sh --elastic, or give torchrun "
            "--rdzv-backend=c10d and the environment TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    serve = ranks.rank == 0 and not served
    listener = _listen(host, port) if serve and sys.platform != "win32" else None
    # torch 2.6 does not answer on a socket of ours with libuv.
    options = dict(master_listen_fd=listener.detach(), use_libuv=False) if listener else {}
    try:
        tcp = dist.TCPStore(host, port, ranks.world_size, serve, timeout, **options)
    except dist.DistError as error:
        raise RunError(f"rank {ranks.rank} cannot reach rank 0 at {host}, port {port}: {_first_line(error)}") from None
    if served:
        tcp = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", tcp)
    return tcp, host


def _listen(host, port):
    """A socket for the store; torch's own would listen on all addresses, even where the host is loopback."""
    try:
        if machines.is_loopback(host):
            return socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen on {host}, port {port} ({os.strerror(error.errno)}): choose another port by "
            "MASTER_PORT, torchrun's --master_port or --init-method"
        ) from None


def _first_line(error):
    return str(error).partition("\n")[0]


def meet(store, host, ranks, args):
    """Wait until all ranks have come to the store, see that their machines are alike, and choose gloo's interface.

    Returns the address by which the others reach this machine, or None where it is not known.
    Raises on all ranks `RunError` where some do not come within `args.timeout`, and names them; `UserError` where the
    machines differ in torch, files or arguments.
    """
    if ranks.world_size == 1:
        return "127.0.0.1"
    store = dist.PrefixStore("meeting", store)
    mine = _describe(ranks, args, host)
    store.set(str(ranks.rank), json.dumps(mine))
    if ranks.rank == 0:
        verdict = _judge(store, ranks, args)
        store.set("verdict", json.dumps(verdict))
    else:
        verdict = _wait_for_verdict(store, args.timeout)
    store.add("read", 1)
    if verdict["error"]:
        _stay(store, "read", verdict["came"], ranks)
        raise (UserError if verdict["came"] == ranks.world_size else RunError)(verdict["error"])
    if ranks.one_machine:
        return "127.0.0.1"
    address, interface = _set_interface(mine["address"], verdict["outside"])
    if not interface and ranks.local_rank == 0:
        sys.stderr.write(
            f"{mine['host']}: cannot tell the interface that leads to the others; see GLOO_SOCKET_IFNAME\n"
        )
    _reach(store, ranks, verdict["machine_ranks"], address, interface)
    return address


def _describe(ranks, args, host):
    """What the others are told of this rank."""
    mine = {
        "node": node(ranks.rank, ranks.local_world_size),
        "host": socket.gethostname(),
        "first_rank": ranks.rank - ranks.local_rank,
    }
    mine |= {"processes": ranks.local_world_size, "address": None, "error": "", "alike": {}}
    if ranks.one_machine:
        return mine
    with contextlib.suppress(OSError):  # no route, which the store has told, or no master in a file's store
        mine["address"] = machines.address_towards(host or "192.0.2.1")  # anywhere outside
    mine["alike"] = (
        {"torch": torch.__version__}
        | _digests()
        | {
            f"--{name.replace('_', '-')}": bool(value) if name in OWN_PATHS else str(value)
            for name, value in sorted(vars(args).items())
            if name not in OWN_ARGUMENTS
        }
    )
    interfaces = [name for _, name in socket.if_nameindex()] if sys.platform != "win32" else []
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if interfaces and name not in interfaces:
            mine["error"] = (
                f"GLOO_SOCKET_IFNAME has {name!r} on {mine['host']}, whose interfaces are {', '.join(interfaces)}: "
                "name one of them, or leave it unset"
            )
    return mine


def _digests():
    """{name: digest} of the script and what it imports from beside it."""
    root = Path(sys.argv[0]).resolve().parent
    paths = {
        Path(module.__file__).resolve() for module in list(sys.modules.values()) if getattr(module, "__file__", None)
    }
    own = [path for path in paths if path.is_relative_to(root) and path.exists() and "site-packages" not in path.parts]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:8] for path in sorted(own)}


def _judge(store, ranks, args):
    """Rank 0: wait for all; returns {"error": line or "", "came": their number, "outside", "machine_ranks"}.

    "outside" is an address that leads off this machine, "machine_ranks" are the first ranks of the machines.
    """
    keys = [str(rank) for rank in range(ranks.world_size)]
    waiting, error, looked = machines.Waiting(args.timeout, RunError), "", 0
    there, what = {}, ""
    try:
        while not store.check(keys):
            if time.monotonic() > looked + 0.5:
                there = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
                what, looked = name_ranks(set(range(ranks.world_size)) - set(there), there.values()), time.monotonic()
            waiting.tell(what)
            time.sleep(0.01)
        there = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys)}
    except RunError as late:
        error = str(late)
    addresses = [mine["address"] for mine in there.values() if mine["address"]]
    outside = [address for address in addresses if not machines.is_loopback(address)]
    errors = [mine["error"] for mine in there.values() if mine["error"]]
    error = error or (errors or [_difference(list(there.values()))])[0]
    first = sorted({mine["first_rank"] for mine in there.values()})
    return {"error": error, "came": len(there), "outside": (outside or [None])[0], "machine_ranks": first}


def _wait_for_verdict(store, timeout):
    try:
        store.wait(["0"], timedelta(seconds=timeout))
    except dist.DistError as error:
        raise RunError(f"rank 0 did not come: {_first_line(error)}") from None
    try:
        store.wait(["verdict"], timedelta(seconds=timeout + 10))
        return json.loads(store.get("verdict"))
    except dist.DistError as error:
        raise RunError(f"rank 0 has gone, or does not answer: {_first_line(error)}") from None


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


def _difference(there):
    """In what the machines differ, in one line; "" where they are alike."""
    labels = [label(mine["node"], mine["host"]) for mine in there]
    for name in dict.fromkeys(name for mine in there for name in mine["alike"]):
        if values := differences([mine["alike"].get(name, "absent") for mine in there], labels):
            return f"machines differ in {name}: {values}; start all with the same torch, files and arguments"
    return ""


def _set_interface(address, outside):
    """Let gloo and NCCL take the interface of the route to the master. Returns (address, interface), None if unknown.

    By itself gloo takes the address of the host's name, which many systems let lead to loopback.
    """
    if address and outside and machines.is_loopback(address):  # rank 0's machine, whose own name was given
        address = machines.address_towards(outside)
    there = machines.interfaces()
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        chosen = chosen.split(",")[0]
        if there.get(address) != chosen:
            address = next((address for address, name in there.items() if name == chosen), None)
    elif chosen := there.get(address):
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={chosen}")
    return address, chosen


def _reach(store, ranks, machine_ranks, address, interface):
    """Raise `RunError` on all ranks where a machine's first rank cannot connect to that of the next machine.

    Else gloo would fail on one machine, with a message that names none, and leave others waiting for `--timeout`.
    """
    with contextlib.ExitStack() as open_until_all_have_tried:
        if ranks.rank in machine_ranks:
            me, host, port = machine_ranks.index(ranks.rank), socket.gethostname(), None
            if address:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.create_server((address, 0), family=family)
                port = open_until_all_have_tried.enter_context(listener).getsockname()[1]
            store.set(f"at {ranks.rank}", json.dumps([host, address, port]))
            name, *other = json.loads(store.get(f"at {machine_ranks[(me + 1) % len(machine_ranks)]}"))
            error = ""
            try:
                if other[0]:
                    socket.create_connection(other, timeout=5).close()
            except OSError as reason:
                error = (
                    f"{host} does not reach {name} at {other[0]}, port {other[1]}, from its interface {interface} "
                    f"({reason.strerror or reason}): all ports must be open between the machines, and "
                    "GLOO_SOCKET_IFNAME, where it is set, name the interface that leads to the others"
                )
            store.set(f"reached {ranks.rank}", error)
        errors = [store.get(f"reached {rank}").decode() for rank in machine_ranks]
    store.add("reached", 1)
    if any(errors):
        _stay(store, "reached", ranks.world_size, ranks)
        raise RunError(next(filter(None, errors)))


def _stay(store, key, count, ranks):
    """Rank 0, who may serve the store, stays until all others have read what it holds."""
    end = time.monotonic() + 3
    while ranks.rank == 0 and store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(0.01)

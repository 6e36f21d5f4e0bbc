"""Several machines: are they alike, by which interface do they reach each other, and do they?"""

import contextlib
import functools
import hashlib
import json
import os
import socket
import sys
from pathlib import Path

import torch

from common import machines
from common.errors import RunError
from common.ranks import differences
from common.waiting import is_loopback, label, stay

# What may differ from process to process.
OWN_ARGUMENTS = ("local_rank", "threads", "init_method")
OWN_PATHS = ("snapshot", "metrics", "tensorboard")


def describe(args, host):
    """What the others are told of this machine: its address towards the host of the store, and what must be alike."""
    mine = {"address": None, "error": ""}
    with contextlib.suppress(OSError):  # no route, which the store has told, or no master in a file's store
        mine["address"] = machines.address_towards(host or "192.0.2.1")  # anywhere outside
    mine["alike"] = {"torch": torch.__version__} | _digests()
    for name, value in sorted(vars(args).items()):
        if name not in OWN_ARGUMENTS:
            mine["alike"][f"--{name.replace('_', '-')}"] = bool(value) if name in OWN_PATHS else str(value)
    interfaces = [name for _, name in socket.if_nameindex()] if sys.platform != "win32" else []
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if interfaces and name not in interfaces:
            mine["error"] = (
                f"GLOO_SOCKET_IFNAME has {name!r} on {socket.gethostname()}, whose interfaces are "
                f"{', '.join(interfaces)}: name one of them, or leave it unset"
            )
    return mine


@functools.cache
def _digests():
    """{name: digest} of the script and what it imports from beside it."""
    root = Path(sys.argv[0]).resolve().parent
    paths = {
        Path(module.__file__).resolve() for module in list(sys.modules.values()) if getattr(module, "__file__", None)
    }
    own = [path for path in paths if path.is_relative_to(root) and path.exists() and "site-packages" not in path.parts]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:8] for path in sorted(own)}


def judge(there):
    """From what all ranks told: {"error": line or "", "outside", "machine_ranks"}.

    "outside" is an address that leads off rank 0's machine, "machine_ranks" are the first ranks of the machines.
    """
    outside = [mine["address"] for mine in there if mine["address"] and not is_loopback(mine["address"])]
    errors = [mine["error"] for mine in there if mine["error"]]
    return {
        "error": (errors or [_difference(there)])[0],
        "outside": (outside or [None])[0],
        "machine_ranks": sorted({mine["first_rank"] for mine in there}),
    }


def _difference(there):
    """In what the machines differ, in one line; "" where they are alike."""
    labels = [label(mine["node"], mine["host"]) for mine in there]
    for name in dict.fromkeys(name for mine in there for name in mine["alike"]):
        if values := differences([mine["alike"].get(name, "absent") for mine in there], labels):
            return f"machines differ in {name}: {values}; start all with the same torch, files and arguments"
    return ""


def connect(store, ranks, address, verdict):
    """Choose the interface, and see that each machine reaches the next. Returns the address that the others reach."""
    address, interface = _set_interface(address, verdict["outside"])
    if not interface and ranks.local_rank == 0:
        host = socket.gethostname()
        sys.stderr.write(f"{host}: cannot tell the interface that leads to the others; see GLOO_SOCKET_IFNAME\n")
    _reach(store, ranks, verdict["machine_ranks"], address, interface)
    return address


def _set_interface(address, outside):
    """Let gloo and NCCL take the interface of the route to the master. Returns (address, interface), None if unknown.

    By itself gloo takes the address of the host's name, which many systems let lead to loopback.
    """
    if address and outside and is_loopback(address):  # rank 0's machine, whose own name was given
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
            if error:
                store.set("not reached", error)
            if store.add("tried", 1) == len(machine_ranks):  # the last one tells all
                store.set("all tried", store.get("not reached") if store.check(["not reached"]) else "")
        error = store.get("all tried").decode()
    store.add("reached", 1)
    if error:
        stay(store, "reached", ranks.world_size, ranks)
        raise RunError(error)

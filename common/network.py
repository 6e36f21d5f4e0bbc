"""Several machines: are they alike, by which interface do they reach each other, and do they?"""

import contextlib
import functools
import hashlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

from common import machines
from common.ranks import differences
from common.waiting import is_loopback, label

import torch

# What may differ from process to process.
OWN_ARGUMENTS = ("began", "local_rank", "threads", "init_method")
OWN_PATHS = ("snapshot", "metrics", "tensorboard")
SIZES = (1, 1000, 4000, 16000, 64000)  # bytes; a packet has up to 1,500, or up to 9,000 where jumbo frames are on


def describe(args, host):
    """What the others are told of this machine: its address towards the host of the store, and what must be alike."""
    mine = {"address": None, "error": ""}
    with contextlib.suppress(OSError):  # no route, which the store has told, or no master in a file's store
        mine["address"] = machines.address_towards(host or "192.0.2.1")  # anywhere outside
    mine["alike"] = {"torch": torch.__version__} | _digests()
    for name, value in sorted(vars(args).items()):
        if name not in OWN_ARGUMENTS:
            mine["alike"][f"--{name.replace('_', '-')}"] = bool(value) if name in OWN_PATHS else str(value)
    interfaces = list(dict.fromkeys(machines.interfaces().values()))
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
    """From what all ranks told: {"error": line or "", "outside", "first_ranks"}.

    "outside" is an address that leads off rank 0's machine, "first_ranks" are those of the machines.
    """
    outside = [mine["address"] for mine in there if mine["address"] and not is_loopback(mine["address"])]
    return {
        "error": next((mine["error"] for mine in there if mine["error"]), "") or _difference(there),
        "outside": (outside or [None])[0],
        "first_ranks": sorted({mine["first_rank"] for mine in there}),
    }


def _difference(there):
    """In what the machines differ, in one line; "" where they are alike."""
    labels = [label(mine["node"], mine["host"]) for mine in there]
    for name in dict.fromkeys(name for mine in there for name in mine["alike"]):
        if values := differences([mine["alike"].get(name, "absent") for mine in there], labels):
            return f"machines differ in {name}: {values}; start all with the same torch, files and arguments"
    return ""


def connect(store, ranks, address, verdict):
    """Choose the interface, and try the way to the next machine.

    Returns the address by which the others reach this machine, None where it is not known; and in one line what is
    wrong, or "". Else gloo would fail on one machine, name none, and leave others waiting for `--timeout`.
    """
    address, interface = _set_interface(address, verdict["outside"])
    if ranks.rank not in verdict["first_ranks"]:
        return address, ""
    if not interface:
        host = socket.gethostname()
        sys.stderr.write(f"{host}: cannot tell the interface that leads to the others; see GLOO_SOCKET_IFNAME\n")
    port = None
    if address:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listener.getsockname()[1]
        threading.Thread(target=_answer, args=(listener, ranks.rank), daemon=True).start()
    store.set(f"at {ranks.rank}", json.dumps([socket.gethostname(), address, port]))
    following = [rank for rank in verdict["first_ranks"] if rank > ranks.rank] or verdict["first_ranks"]
    name, *other = json.loads(store.get(f"at {following[0]}"))
    return address, _try_way(interface, following[0], name, *other) if other[0] else ""


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


def _mark(rank):
    """A byte by which to tell ranks apart: on a wrong interface a machine may reach itself."""
    return bytes([rank % 255 + 1])


def _answer(listener, rank):
    """Send the machine that connects this rank's mark for each of `SIZES` that has come."""
    listener.settimeout(60)
    with contextlib.suppress(OSError), listener:  # the other one may fail
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as received:
            for size in SIZES:
                received.read(size)
                connection.sendall(_mark(rank))


def _try_way(interface, rank, name, address, port):
    """In one line what is wrong on the way to a rank on the machine `name`; "" where all `SIZES` come there."""
    host, passed = socket.gethostname(), 0
    try:
        with socket.create_connection((address, port), timeout=5) as connection:
            for size in SIZES:
                connection.sendall(bytes(size))
                if connection.recv(1) != _mark(rank):
                    raise OSError("another one answers")
                passed = size
    except OSError as reason:
        why = f"({reason.strerror or reason})"
        if passed:
            return (
                f"from {host} {passed:,} bytes at once reach {name}, {size:,} do not {why}: something between them "
                f"drops large packets; give all interfaces the MTU that it takes, such as `ip link set {interface} mtu "
                "1500`"
            )
        return (
            f"{host} does not reach {name} at {address}, port {port}, from its interface {interface} {why}: all ports "
            "must be open between the machines, and GLOO_SOCKET_IFNAME, where it is set, name the interface that "
            "leads to the others"
        )
    return ""

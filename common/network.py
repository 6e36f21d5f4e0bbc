"""Several machines: are they alike, by which address and interface do they reach each other, and do they?"""

import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
from pathlib import Path

from common.errors import UserError
from common.ranks import differences, is_literal_loopback, is_loopback, label

import torch

# What may differ from process to process.
OWN_ARGUMENTS = ("began", "local_rank", "threads", "init_method")
OWN_PATHS = ("snapshot", "metrics", "tensorboard")
SIZES = (1, 1000, 4000, 16000, 64000)  # bytes; a packet has up to 1,500, or up to 9,000 where jumbo frames are on


def address_towards(host):
    """This machine's address on the route to a host. Raises `OSError` where there is none."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing
        return probe.getsockname()[0]


def interfaces():
    """{address: name of the interface that has it} on this machine; empty where that cannot be told."""
    if sys.platform != "linux":
        return {}
    import fcntl  # not on Windows

    found, ipv6 = {}, Path("/proc/net/if_inet6")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, 0x8915, struct.pack("40s", name.encode()))  # SIOCGIFADDR
                found[socket.inet_ntoa(answer[20:24])] = name
    for address, *_, name in map(str.split, ipv6.read_text().splitlines() if ipv6.exists() else []):
        found[str(ipaddress.ip_address(bytes.fromhex(address)))] = name
    return found


def is_master_here(args):
    """Whether node rank 0 is here. Raises `UserError` where the master address contradicts the node rank."""
    name, rank, machine = args.master_addr, args.node_rank, socket.gethostname()
    loopback = is_loopback(name)
    try:
        here = loopback or address_towards(name) == socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        raise UserError(f"--master-addr {name}: {error.strerror}; give an address that all machines know") from None
    if args.simulated:
        return rank == 0
    if (is_literal_loopback(name) and args.nnodes != 1) or (args.elastic and here and loopback):
        raise UserError(
            f"--master-addr {name} leads {machine} to itself: give the address by which others reach node "
            "rank 0; to try several machines on one, take --simulate"
        )
    if rank is not None and (rank == 0) != here and not (rank and loopback):
        raise UserError(
            f"--node-rank {rank} on {machine}, but --master-addr {name} is {'' if here else 'not '}its "
            "address: it must be that of node rank 0"
        )
    return here if rank is None else rank == 0


def describe(args, host):
    """What the others are told of this machine: its address towards the host of the store, and what must be alike."""
    mine = {"address": None}
    with contextlib.suppress(OSError):  # no route, which the store has told, or no master in a file's store
        mine["address"] = address_towards(host or "192.0.2.1")  # anywhere outside
    mine["alike"] = {"torch": torch.__version__} | _digests()
    for name, value in sorted(vars(args).items()):
        if name not in OWN_ARGUMENTS:
            mine["alike"][f"--{name.replace('_', '-')}"] = bool(value) if name in OWN_PATHS else str(value)
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
    """From what all ranks told: an address that leads off rank 0's machine, or None, and the machines' first ranks.

    Raises `UserError` where machines differ.
    """
    labels = [label(mine["node"], mine["host"]) for mine in there]
    for name in dict.fromkeys(name for mine in there for name in mine["alike"]):
        if values := differences([mine["alike"].get(name, "absent") for mine in there], labels):
            raise UserError(f"machines differ in {name}: {values}; start all with the same torch, files and arguments")
    outside = [mine["address"] for mine in there if mine["address"] and not is_loopback(mine["address"])]
    first_ranks = {mine["rank"] - mine["local_rank"] for mine in there}
    return {"outside": (outside or [None])[0], "first_ranks": sorted(first_ranks)}


def connect(store, ranks, address, verdict):
    """Let gloo and NCCL take the interface of the route to the master, and try the way to the next machine.

    By itself gloo takes the address of the host's name, which many systems let lead to loopback. Where that fails it
    does so on one machine, names none, and leaves others waiting for `--timeout`. Returns the address by which the
    others reach this machine, None where it is not known; and in one line what is wrong, or "".
    """
    host, there, outside, port = socket.gethostname(), interfaces(), verdict["outside"], None
    if address and outside and is_loopback(address):  # rank 0's machine, whose own name was given
        address = address_towards(outside)
    error, interface = "", os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface and there.get(address) != interface:
        address = next((address for address, name in there.items() if name == interface), None)
        if there and not address:
            names = ", ".join(dict.fromkeys(there.values()))
            error = f"GLOO_SOCKET_IFNAME has {interface!r} on {host}, whose interfaces are {names}: name one"
    if not interface and (interface := there.get(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if ranks.local_rank:
        return address, error
    if not interface:
        sys.stderr.write(f"{host}: cannot tell the interface that leads to the others; see GLOO_SOCKET_IFNAME\n")
    if address:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listener.getsockname()[1]
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    store.set(f"at {ranks.rank}", json.dumps([host, address, port]))
    following = [rank for rank in verdict["first_ranks"] if rank > ranks.rank] or verdict["first_ranks"]
    name, *there = json.loads(store.get(f"at {following[0]}"))
    return address, error or (_try_way(interface, name, *there) if there[0] else "")


def _answer(listener):
    """Let the machine that connects know of each of `SIZES` when it has come."""
    listener.settimeout(60)
    with contextlib.suppress(OSError), listener:  # the other one may fail
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as received:
            for size in SIZES:
                received.read(size)
                connection.sendall(b"+")


def _try_way(interface, name, address, port):
    """In one line what is wrong on the way to the machine `name`; "" where all of `SIZES` come there."""
    host, passed = socket.gethostname(), 0
    try:
        with socket.create_connection((address, port), timeout=5) as connection:
            for size in SIZES:
                connection.sendall(bytes(size))
                if not connection.recv(1):
                    raise OSError("it hung up")
                passed = size
    except OSError as error:
        cure = "all ports must be open, and GLOO_SOCKET_IFNAME, where it is set, name the interface that leads there"
        if passed:
            cure = f"something drops large packets; let all interfaces have its MTU: `ip link set {interface} mtu 1500`"
        what = f"{passed:,} bytes at once from {host} do, {size:,} do not" if passed else f"{host} does not"
        why = error.strerror or error
        return f"{what} reach {name} at {address}, port {port}, from its interface {interface} ({why}): {cure}"
    return ""

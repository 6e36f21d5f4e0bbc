"""Several machines: by which address and interface they reach each other, and how they meet before torchrun starts.

Nothing but the standard library: ddp_multinode.sh uses it before torch is imported.
"""

import ipaddress
import json
import os
import select
import socket
import struct
import sys
import time
from array import array
from pathlib import Path

from common.waiting import PAUSE, Waiting, address_of, is_loopback, label

# ------------------------------------------------------------------------------------- addresses, interfaces


def is_here(host):
    """Whether a name or address is this machine's. Raises `OSError` where the name is not known."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


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

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        entries = array("B", bytes(40 * 1024))  # struct ifreq, see `man 7 netdevice`
        request = struct.pack("iL", len(entries), entries.buffer_info()[0])
        (length,) = struct.unpack_from("i", fcntl.ioctl(any_socket, 0x8912, request))  # SIOCGIFCONF
    for start in range(0, length, 40):
        entry = entries[start : start + 40].tobytes()
        found[socket.inet_ntoa(entry[20:24])] = entry[:16].partition(b"\0")[0].decode().partition(":")[0]
    for line in Path("/proc/net/if_inet6").read_text().splitlines() if Path("/proc/net/if_inet6").exists() else []:
        address, *_, name = line.split()
        found[str(ipaddress.ip_address(bytes.fromhex(address)))] = name
    return found


# -------------------------------------------------------------------------------------- before torchrun starts


class MeetingError(Exception):
    """One line: what went wrong and what to do."""


def meet(args):
    """Wait for the other machines. Returns the master's address, the own address, and whether this is the master.

    The master's address is the one by which another machine reached it: on its own machine its name may lead to
    loopback. Elastic machines wait for the master alone.
    """
    check_place(args)
    is_master = args.node_rank == 0 if args.node_rank is not None else is_here(args.master_addr)
    if not is_master:
        return *join(args), 0
    listener = listen(args.master_port)
    master = args.master_addr if args.elastic else host(args, listener)
    listener.close()
    return master, address_of(master), 1


def check_place(args):
    """Raise `MeetingError` where the master address is not on the machine that the node rank says."""
    name, rank = args.master_addr, args.node_rank
    try:
        here, address, loopback = is_here(name), address_of(name), is_loopback(name)
    except OSError as error:
        raise MeetingError(f"--master-addr {name}: {error.strerror}; give an address that all machines know") from None
    if not args.elastic and args.nnodes > 1 and not args.simulated and name.startswith(("127.", "::1", "localhost")):
        raise MeetingError(
            f"--master-addr {name} leads each machine to itself: give the address by which others reach node rank 0; "
            "to try several machines on one, take --simulate"
        )
    if rank == 0 and not here:
        raise MeetingError(
            f"--node-rank 0 on {socket.gethostname()}, but --master-addr {name} is not its address: give this machine "
            "another node rank, or all machines the address of this one"
        )
    if rank and here and not loopback:
        raise MeetingError(
            f"--node-rank {rank} on {socket.gethostname()}, but it has the address {address} of --master-addr, where "
            "node rank 0 must be; to try several machines on one, take --simulate"
        )
    if args.elastic and here and loopback and not name.startswith(("127.", "::1", "localhost")):
        raise MeetingError(f"--master-addr {name} is {address} on its own machine: --elastic needs the address itself")
    if args.elastic and loopback and rank is None:
        raise MeetingError(f"--elastic with --master-addr {name} needs --node-rank: it is the address of each machine")


def listen(port):
    """A socket on all addresses, as torchrun will make it. Raises `MeetingError` where the port is taken."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise MeetingError(
            f"{socket.gethostname()} cannot listen on port {port} ({os.strerror(error.errno)}): end what does, or give "
            "all machines another by --master-port"
        ) from None


def receive(connection, waiting=None, what=None):
    """One JSON value. Raises `OSError` where it does not come, without `waiting` within a second; else `ValueError`."""
    text = b""
    connection.settimeout(1)
    while not text.endswith(b"\n"):
        try:
            chunk = connection.recv(1)  # no more: another value may follow
        except TimeoutError:
            if not waiting:
                raise
            waiting.tell(what)
            continue
        if not chunk:
            raise ValueError("hung up")
        text += chunk
    return json.loads(text)


def send(connection, value):
    connection.sendall(json.dumps(value).encode() + b"\n")


def host(args, listener):
    """Node rank 0: wait for all others, and tell them that all are there. Returns its address as they know it."""
    name, address = socket.gethostname(), address_of(args.master_addr)
    arrived, names = {}, {0: name}
    waiting = Waiting(args.timeout, MeetingError)
    listener.settimeout(0.2)
    while missing := [f"node {node}" for node in range(args.nnodes) if node not in names]:
        there = ", ".join(label(node, names[node]) for node in sorted(names))
        waiting.tell(f"{', '.join(missing)}; here is {there}")
        for node, connection in list(arrived.items()):
            if select.select([connection], [], [], 0)[0]:  # it hung up
                del arrived[node], names[node]
        try:
            connection, _ = listener.accept()
            node, nnodes, other = receive(connection)
        except (OSError, ValueError, TypeError):  # nobody came, or some other program
            continue
        error = ""
        if nnodes != args.nnodes:
            error = f"--nnodes {nnodes} on {other}, but {args.nnodes} on {name}: start all with the same command"
        elif node in names:
            error = f"--node-rank {node} on {other}, but {names[node]} has it: give each machine its own"
        else:
            arrived[node], names[node] = connection, other
            address = connection.getsockname()[0].removeprefix("::ffff:")
        send(connection, [error, name])
    for connection in arrived.values():
        send(connection, address)
    return address


def join(args):
    """Another node rank: wait for node rank 0, and with it for the others. Returns (its address, the own address)."""
    place, address = f"node 0 at {args.master_addr}, port {args.master_port}", address_of(args.master_addr)
    waiting = Waiting(args.timeout, MeetingError)
    while True:
        what = place
        try:
            with socket.create_connection((address, args.master_port), timeout=PAUSE) as connection:
                own = connection.getsockname()[0]
                if args.elastic:
                    return args.master_addr, own
                send(connection, [args.node_rank, args.nnodes, socket.gethostname()])
                what = f"{place}: what listens there does not answer"
                error, name = receive(connection, waiting, what)
                if error:
                    raise MeetingError(error)
                return receive(connection, waiting, f"the others, together with {label(0, name)}"), own
        except TimeoutError:
            what = f"{place}: no answer; is the address right, and does no firewall drop what is sent there?"
        except OSError as error:
            what = f"{place}: {os.strerror(error.errno)}"
        except (ValueError, TypeError):
            what = f"{place}: what listens there is not this script, or has other options"
        waiting.tell(what)
        time.sleep(0.5)

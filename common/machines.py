"""Several machines: by which address and interface they reach each other, and how they meet before torchrun starts.

Nothing but the standard library: ddp_multinode.sh uses it before torch is imported.
"""

import argparse
import contextlib
import ipaddress
import json
import math
import os
import socket
import struct
import sys
import time
from pathlib import Path

from common.waiting import PAUSE, Waiting, address_of, is_literal_loopback, is_loopback, label, listen

# ------------------------------------------------------------------------------------- addresses, interfaces


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
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, 0x8915, struct.pack("40s", name.encode()))  # SIOCGIFADDR
                found[socket.inet_ntoa(answer[20:24])] = name
    for line in Path("/proc/net/if_inet6").read_text().splitlines() if Path("/proc/net/if_inet6").exists() else []:
        address, *_, name = line.split()
        found[str(ipaddress.ip_address(bytes.fromhex(address)))] = name
    return found


# -------------------------------------------------------------------------------------- before torchrun starts


class MeetingError(Exception):
    """One line: what went wrong and what to do."""


def meet(args, is_master):
    """Wait for the other machines. Returns the master's address, the own address, and connections to the others.

    The master's address is the one by which another machine reached it: on its own machine its name may lead to
    loopback. The connections stay open as long as the run. Elastic machines wait for the master alone, and have none.
    """
    if not is_master:
        return join(args)
    try:
        listener = listen("", args.master_port)
    except OSError as error:
        raise MeetingError(
            f"{socket.gethostname()} cannot listen on port {args.master_port} ({os.strerror(error.errno)}): end what "
            "does, or give all machines another by --master-port"
        ) from None
    with listener:
        master, others = (args.master_addr, []) if args.elastic else host(args, listener)
    return master, address_of(master), others


def is_master_here(args):
    """Whether node rank 0 is here. Raises `MeetingError` where the master address contradicts the node rank."""
    name, rank, machine = args.master_addr, args.node_rank, socket.gethostname()
    try:
        address, loopback = address_of(name), is_loopback(name)
        here = loopback or address_towards(name) == address
    except OSError as error:
        raise MeetingError(f"--master-addr {name}: {error.strerror}; give an address that all machines know") from None
    if args.simulated:
        return rank == 0
    if is_literal_loopback(name) and args.nnodes != 1:
        raise MeetingError(
            f"--master-addr {name} leads each machine to itself: give the address by which others reach node rank 0; "
            "to try several machines on one, take --simulate"
        )
    if rank == 0 and not here:
        raise MeetingError(
            f"--node-rank 0 on {machine}, but --master-addr {name} is not its address: give this machine another node "
            "rank, or all machines the address of this one"
        )
    if rank and here and not loopback:
        raise MeetingError(
            f"--node-rank {rank} on {machine}, but it has the address {address} of --master-addr, where node rank 0 "
            "must be; to try several machines on one, take --simulate"
        )
    if args.elastic and here and loopback:
        raise MeetingError(f"--master-addr {name} is {address} on its own machine: --elastic needs the address itself")
    return here if rank is None else rank == 0


def check_batch_size(args):
    """Raise `MeetingError` where the batch would not divide once a machine has come or gone: the run would end."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--batch-size", type=int)
    with contextlib.suppress(argparse.ArgumentError):  # which the ranks tell
        size, (low, high) = parser.parse_known_args(args.command)[0].batch_size, map(int, args.elastic.split(":"))
        counts = [machines * args.nproc_per_node for machines in range(low, high + 1)]
        if size and (bad := [count for count in counts if size % count]):
            raise MeetingError(
                f"--batch-size {size} does not divide into {bad[0]} processes, which --elastic {args.elastic} allows: "
                f"take a multiple of {math.lcm(*counts)}, or other limits"
            )


def send(connection, *values):
    connection.sendall(json.dumps(values).encode() + b"\n")


def host(args, listener):
    """Node rank 0: wait for all others, and tell them that all are there. Returns its address as they know it."""
    name, address, others = socket.gethostname(), address_of(args.master_addr), {}
    waiting = Waiting(args.timeout, MeetingError)
    listener.settimeout(0.2)
    while missing := [f"node {node}" for node in range(1, args.nnodes) if node not in others]:
        there = [label(0, name), *(label(node, others[node][0]) for node in sorted(others))]
        what = f"{', '.join(missing)}; here is {', '.join(there)}"
        late = ""
        try:
            waiting.tell(what)
        except MeetingError as error:
            late = str(error)
        for node, (_, connection) in list(others.items()):
            try:
                send(connection, late, what, "")
            except OSError:  # it hung up
                del others[node]
        if late:
            raise MeetingError(late)
        with contextlib.suppress(OSError, ValueError, TypeError):  # nobody came, or some other program
            connection, _ = listener.accept()
            connection.settimeout(1)
            node, nnodes, other = json.loads(connection.makefile().readline(1000))
            error = ""
            if nnodes != args.nnodes:
                error = f"--nnodes {nnodes} on {other}, but {args.nnodes} on {name}: start all with the same command"
            elif twin := {0: [name], **others}.get(node):
                error = f"--node-rank {node} on {other}, but {twin[0]} has it: give each machine its own"
            else:
                others[node] = other, connection
                address = connection.getsockname()[0].removeprefix("::ffff:")
            send(connection, error, what, "")
    for _, connection in others.values():
        send(connection, "", "", address)
        connection.settimeout(None)
    return address, [connection for _, connection in others.values()]


def join(args):
    """Another node rank: wait for node rank 0, and with it for the others. See `meet` for what it returns."""
    place, address = f"node 0 at {args.master_addr}, port {args.master_port}", address_of(args.master_addr)
    waiting = Waiting(args.timeout, MeetingError)
    while True:
        try:
            connection = socket.create_connection((address, args.master_port), timeout=PAUSE)
            own = connection.getsockname()[0]
            if args.elastic:
                connection.close()
                return args.master_addr, own, []
            send(connection, args.node_rank, args.nnodes, socket.gethostname())
            for line in connection.makefile():  # node rank 0 tells all the time for whom it waits
                error, what, master = json.loads(line)
                if error:
                    raise MeetingError(error)
                if master:
                    connection.settimeout(None)
                    return master, own, [connection]
                waiting.tell(what)
            what = f"{place}: it hung up"
        except TimeoutError:
            what = f"{place}: no answer; is the address right, and does no firewall drop what is sent there?"
        except OSError as error:
            what = f"{place}: {os.strerror(error.errno)}"
        except (ValueError, TypeError):
            what = f"{place}: what listens there is not this script, or has other options"
        waiting.tell(what)
        time.sleep(0.5)

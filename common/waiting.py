"""Names, addresses, and waiting with a word for whom. Standard library only: ddp_multinode.sh uses it too."""

import ipaddress
import os
import socket
import sys
import time

PAUSE = 5  # seconds between two lines that say what is waited for


class Waiting:
    """Says every few seconds what is waited for; raises `error` after `timeout` seconds, or when the parent is gone."""

    def __init__(self, timeout, error):
        self.timeout, self.error, self.start, self.parent = timeout, error, time.monotonic(), os.getppid()
        self.told = 1 - PAUSE  # seconds: the first line comes soon

    def tell(self, what):
        passed = time.monotonic() - self.start
        if passed > self.timeout or os.getppid() != self.parent:
            raise self.error(f"waited {passed:.0f} s in vain for {what}")
        if passed > self.told + PAUSE:
            self.told = passed
            sys.stderr.write(f"waiting for {what} ({passed:.0f} of {self.timeout:g} s)\n")


def stay(store, key, count, ranks):
    """Rank 0, who may serve the store, stays until all others have read what it holds."""
    end = time.monotonic() + 3
    while ranks.rank == 0 and store.add(key, 0) < count and time.monotonic() < end:
        time.sleep(0.01)


def few(items, separator=", ", more="more"):
    """Items in words; of many the first eight, and how many there are beside them."""
    items = list(map(str, items))
    return separator.join(items[:8]) + f" and {len(items) - 8} {more}" * (len(items) > 8)


def label(node_rank, host):
    return f"node {node_rank} ({host})"


def address_of(host):
    """The address of a name. Raises `OSError` where it is not known."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]


def is_loopback(host):
    """Whether a name or address leads to this machine alone."""
    try:
        return ipaddress.ip_address(address_of(host)).is_loopback
    except OSError:  # not known, or not known yet
        return False


def is_literal_loopback(host):
    """Whether a name or address means loopback on every machine, and not where a machine's own name leads to it."""
    return host.startswith(("127.", "::1", "localhost"))


def listen(host, port):
    """A socket that listens: for loopback on that address alone, else on all. Raises `OSError` where it cannot."""
    if is_loopback(host):
        return socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))

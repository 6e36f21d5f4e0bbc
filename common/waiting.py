"""Names, addresses, and lists in words. Standard library only."""

import ipaddress
import socket


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

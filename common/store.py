"""The store at a port, through which ranks and machines find each other."""

import os
import socket
import sys
import time
from datetime import timedelta
from urllib.parse import urlsplit

from common.errors import RunError, UserError
from common.meeting import PAUSE, Waiting, deadline
from common.ranks import is_literal_loopback, is_loopback

import torch.distributed as dist


def open_tcp(ranks, timeout):
    """(the store of the ranks, the host that serves it). See `connect` for what it raises."""
    url = urlsplit(ranks.init_method)
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served, restarts = ranks.serves_store, os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if served and restarts != "0" and not ranks.one_machine:
        # After a restart the ranks would find in it where those of the attempt before were.
        raise UserError(
            "--max-restarts on several machines: start by ddp_multinode.sh --elastic, or give torchrun "
            "--rdzv-backend=c10d and the environment TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    # A launcher serves its store before it starts a rank: where it does not answer soon, it was killed meanwhile.
    patience = min(30, timeout.total_seconds()) if served else timeout.total_seconds()
    store = connect(host, port, ranks, patience, ranks.rank == 0 and not served)
    store.set_timeout(timeout)
    if served:
        store = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    return store, host


def connect(host, port, ranks, timeout, serve):
    """A store at this address. serve: whether this process serves it, on loopback alone where the host is that.

    Raises `UserError` where it cannot listen there, `RunError` where nobody serves it within `timeout` seconds.
    """
    waiting, options = Waiting(timeout, ranks), {}
    while not serve:  # torch would show stacks where nobody listens yet
        try:
            socket.create_connection((host, port), PAUSE).close()
            break
        except OSError as error:
            waiting.tell(f"{host}, port {port} ({error.strerror or error})")
            time.sleep(0.2)

    silent = f"what listens on {host}, port {port} does not answer as a store does: is the port right?"
    try:
        loopback = is_loopback(host) and (ranks.one_machine or is_literal_loopback(host))
        if serve and loopback and sys.platform != "win32":
            # torch's own socket would listen on all addresses; torch 2.6 does not answer on this one with libuv.
            listener = socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])
            options = dict(master_listen_fd=listener.detach(), use_libuv=False)
        # With several tenants it serves torchrun's agent too, where that is in this process.
        options |= dict(wait_for_workers=False, multi_tenant=True)
        with deadline(timeout + 5, silent):
            return dist.TCPStore(host, port, None, serve, timedelta(seconds=timeout), **options)
    except (OSError, RuntimeError) as error:  # torch 2.6 has no DistError where a port is taken
        what = "listen on" if serve else "reach rank 0 at"
        line = f"rank {ranks.rank} cannot {what} {host}, port {port} ({str(error).partition(chr(10))[0]})"
        raise (UserError(f"{line}: free it or take another one") if serve else RunError(line)) from None

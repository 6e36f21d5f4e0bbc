"""What many ranks ask of the store: seconds to meet, to tell of a rank that died, and to end, on one real `TCPStore`.

Threads play the ranks, eight to a machine, each with a connection of its own; all share the cores of this machine.
"""

import io
import multiprocessing
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from datetime import timedelta
from threading import Barrier

from common import meeting, network
from common.options import Options
from common.place import Ranks
from common.watch import Watch

import torch.distributed as dist

WORLD_SIZES = (128, 1024)
EACH = 8  # ranks of a machine


def measure(sizes=WORLD_SIZES):
    return {f"{size} ranks": seconds(size) for size in sizes}


def seconds(world_size):
    """{what: seconds until the last of `world_size` ranks was through}"""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    server = context.Process(target=serve, args=(port, ready, done))
    server.start()
    ready.wait()
    try:
        return play(world_size, port)
    finally:
        done.set()
        server.join()


def serve(port, ready, done):
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ready.set()
    done.wait()
    del store


def play(world_size, port):
    args = Options(__doc__, ddp=True, launched=True).parse_args(["--timeout", "120"])
    child = subprocess.Popen(["true"])
    child.wait()  # a process that is gone
    network.describe(args, "127.0.0.1")  # digests of the files, which each rank computes on a core of its own
    together, found = Barrier(world_size), {}

    def rank(number):
        place = Ranks(number, world_size, number % EACH, EACH, "torchrun", node=number // EACH, serves_store=True)
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=120))
        watch = Watch(store, place)
        watch.host, watch.timeout = f"host{place.node}", 120

        def timed(what, function):
            together.wait()
            start = time.perf_counter()
            result = function()
            together.wait()
            found[what] = time.perf_counter() - start
            return result

        timed("meet", lambda: meeting.meet(store, "127.0.0.1", place, args))
        watch.announce(number, child.pid if number == 3 else os.getpid())
        timed("end", watch.end_together)

        def lose():
            watch.report("lost", "Connection closed by peer")
            return watch.verdict()

        line = timed("tell of a dead rank", lose if number != 3 else lambda: None)
        assert number == 3 or line.startswith("rank 3 on host0 is gone"), line

    with redirect_stderr(io.StringIO()), ThreadPoolExecutor(world_size) as threads:  # each machine tells it
        for future in [threads.submit(rank, number) for number in range(world_size)]:
            future.result()
    return {what: round(passed, 2) for what, passed in found.items()}

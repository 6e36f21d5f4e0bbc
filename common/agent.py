"""torchrun in this process: its agent starts the ranks here, and the status that they end with comes out."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

GRACE = 20  # seconds in which the ranks here tell that others failed, and end
MISTAKE, STOPPED = 2, {130, 143}  # exit status of ranks: no new attempt is made after these


class Agent(LocalElasticAgent):
    """torchrun's agent, which ends the ranks after the first signal, or when other machines have failed."""

    received, failed_here, failed_elsewhere, repeated = [], threading.Event(), threading.Event(), False

    def _start_workers(self, group):
        pids = super()._start_workers(group)
        for number in (signal.SIGTERM, signal.SIGINT):  # torch's handler would let a second signal end the saving
            signal.signal(number, self._receive)
        return pids

    def _receive(self, number, frame):
        self.received.append((number, time.monotonic()))
        if self._worker_group.state.name != "HEALTHY":
            sys.exit(128 + number)  # no rank runs here: it waits for other machines
        if not self.repeated and time.monotonic() > self.received[0][1] + 1:  # sooner it is the same one, sent twice
            for rank in self._pcontext.subprocess_handlers.values():
                rank.proc.kill()

    def _monitor_workers(self, group):
        if self.received or self.failed_elsewhere.is_set():
            self._stop_workers(group)  # SIGTERM; SIGKILL after 30 s
        result = super()._monitor_workers(group)
        codes = {failure.exitcode for failure in result.failures.values()}
        if codes and (self.received or MISTAKE in codes or (codes & STOPPED and not _somebody_comes(group))):
            raise ChildFailedError("", result.failures)
        return result


def start(command, store, repeated):
    """Run torchrun's command until its ranks have ended, and return the exit status.

    store: in which the machines let each other know that they fail, or None. repeated: whether a scheduler may send a
    signal repeatedly, and kills by itself.
    """
    Agent.repeated, api.LocalElasticAgent = repeated, Agent
    os.environ["DDP_AGENT"] = ""  # tells the ranks that this agent knows a mistake by its exit status
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)  # the ranks tell what happened, in one line
    watch = threading.Thread(target=_watch, args=(store,), daemon=True)
    watch.start()
    try:
        run.run(run.parse_args(command[1:]))
        return 0
    except ChildFailedError as error:
        status = _status(error.failures, any(word.startswith("--snapshot") for word in command))
    except (RendezvousError, dist.DistError) as error:
        status = 128 + Agent.received[0][0] if Agent.received else 1  # the machine with the store has stopped sooner
        if not Agent.received:
            sys.stderr.write(f"error: the machines lost each other: {str(error).partition(chr(10))[0]}\n")
    Agent.failed_here.set()
    watch.join(2)  # not for ever: the link to the store may be cut
    return status


def _somebody_comes(group):
    """Whether another machine waits to join: it stops the ranks as well, but for a new attempt."""
    try:
        return group.spec.rdzv_handler.num_nodes_waiting() > 0
    except (RendezvousError, dist.DistError):  # the machine with the rendezvous has stopped and left already
        return False


def _watch(store):
    """Let the others know when this machine fails. When another one does, or the store is gone, end stuck ranks."""
    with contextlib.suppress(dist.DistError):
        while store and not store.check(["failed"]):
            if Agent.failed_here.wait(1):
                store.set("failed", "")
    if store and not Agent.failed_here.wait(GRACE):
        Agent.failed_elsewhere.set()


def _status(failures, saves):
    """The exit status for {rank: its failure}; tells what no rank here could tell. saves: whether to a snapshot."""
    codes, host = {failure.exitcode for failure in failures.values()}, socket.gethostname()
    if Agent.failed_elsewhere.is_set():
        ranks = ", ".join(map(str, sorted(failures)))
        sys.stderr.write(f"error: another machine has failed, and rank {ranks} on {host} did not end: it was killed\n")
        return 1
    if MISTAKE in codes:
        return MISTAKE
    if saves and codes <= STOPPED and 0 not in failures:  # rank 0 has said it on its machine
        print(f"stopped by {signal.Signals(max(codes) - 128).name}: see the machine of rank 0 for the step", flush=True)
    if Agent.received:
        return 128 + Agent.received[0][0]
    if told := [code for code in codes if code > 0]:
        return min(told)
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    sys.stderr.write(f"error: rank {rank} on {host} was killed by {first.signal_name()}\n")
    return 128 - first.exitcode

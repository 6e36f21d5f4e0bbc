"""What the ranks let each other know: that they live, where they end, and how they failed."""

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from common.errors import process, stop_signals
from common.judge import judge
from common.waiting import few

import torch.distributed as dist

PATIENCE = 4  # seconds in which the ranks that live report


class Watch:
    """What the ranks let each other know, through the store in which they met: that they live, and how they failed.

    A report is a dict: "rank"; "kind", see `judge`; "where" in its training the rank was; "why", in words; "waited",
    for how many seconds in vain, or 0; "ended", whether it had left the training. What N ranks ask of the store grows
    with N, not with its square: reports are numbered as they come, each is fetched once, and one rank of each machine
    judges for all there.
    """

    def __init__(self, store, ranks, timeout=0):
        """timeout: seconds."""
        self.store, self.ranks, self.timeout = dist.PrefixStore("faults", store), ranks, timeout
        self.ended, self.signal, self.host = False, None, socket.gethostname()
        self.fetched, self.processes, self.server = {}, {}, "rank 0"
        self.serves = ranks.rank == 0 and not (ranks.serves_store or ranks.has_parent)

    def begin(self, backend):
        """Let the others know this process, and tell them of its end."""
        self.announce()
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGUSR2)  # shows the stacks
        faulthandler.enable()  # NCCL aborts a process whose collective takes too long
        # With NCCL no handler could run while this process waits for the others.
        if not self.ranks.has_parent and backend == "gloo":
            for number in set(stop_signals()) - {signal.SIGINT}:
                signal.signal(number, self._receive)

    def announce(self, pid=None):
        self._set(f"process {self.ranks.rank}", [self.host, pid or os.getpid(), _process_space()])

    def joined(self):
        self.server = self.names([0])  # while the store can be asked

    def _receive(self, number, frame):
        self.signal = signal.Signals(number)
        raise SystemExit(128 + number)

    def _set(self, key, value):
        self.store.set(key, json.dumps(value))

    def _fetch(self, found, keys):
        """Add to `found` the values of those of the keys that are there and not in it yet."""
        keys = [key for key in keys if key not in found]
        if keys and not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        if keys:
            found.update(zip(keys, map(json.loads, self.store.multi_get(keys)), strict=True))
        return found

    # ---------------------------------------------------------------------------------------- all went well

    def all_leave(self, where):
        """Whether all ranks leave a loop here; waits for them, but not for ever: others may go on in it."""
        if self.store.add(f"leave {where}", 1) == self.ranks.world_size:
            self.store.set(f"all leave {where}", "")
        try:
            self.store.wait([f"all leave {where}"], timedelta(seconds=min(30, self.timeout)))
        except RuntimeError as error:
            if not is_lost(error):
                raise
            return False
        return True

    def end_together(self):
        """Wait until all ranks are here. Returns in one line who ended the training elsewhere than others, or "".

        Raises `DistError` where one does not come within the timeout.
        """
        world_size, self.ended = self.ranks.world_size, True
        self._set(f"end {self.ranks.rank}", process.where())
        if self.store.add("ends", 1) == world_size:
            ends = [*self._fetch({}, [f"end {rank}" for rank in range(world_size)]).values()]
            others = [rank for rank in range(world_size) if ends[rank] != ends[0]]
            line = f"{self.names(others)} ended in {ends[others[0]]}, rank 0 in {ends[0]}" if others else ""
            self.store.set("all ends", line)
        self.store.wait(["all ends"], timedelta(seconds=self.timeout))
        line = self.store.get("all ends").decode()
        self.stay(PATIENCE)
        return line

    def stay(self, seconds):
        """Let the rank that serves the store stay until the others need it no more."""
        self.store.add("left", 1)
        end = time.monotonic() + seconds
        while self.serves and self.store.add("left", 0) < self.ranks.world_size and time.monotonic() < end:
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------- one failed

    def report(self, kind, why="", waited=0, gone=None):
        """Let the others know how this rank ended, or the rank `gone`, which cannot tell it any more."""
        report = {"rank": self.ranks.rank, "kind": kind, "where": process.where(), "why": why, "waited": waited}
        report["ended"] = self.ended
        if gone is not None:
            report |= {"rank": gone, "where": "", "ended": False}
            self.store.add("left", 1)
        self._set(f"report {self.store.add('reports', 1)}", report)

    def reports(self):
        """{rank: report} of the ranks that left one."""
        keys = [f"report {number}" for number in range(1, self.store.add("reports", 0) + 1)]
        return {report["rank"]: report for report in reversed(self._fetch(self.fetched, keys).values())}

    def first(self):
        """Whether this process is the first on its machine that asks."""
        return self.store.add(f"first on {self.host}", 1) == 1

    def examine(self):
        """Wait for the others' reports; return the line to tell, which one rank of each machine finds for all there.

        Where others were waited for in vain, ends the processes of this machine that are stuck; they show where before.
        """
        verdict = f"verdict on {self.host}"
        # A signal may have come to this rank alone, and the others still have to find out.
        if not self.signal and self.store.add(f"judges on {self.host}", 1) > 1:
            with contextlib.suppress(RuntimeError):  # the judge may have been killed
                self.store.wait([verdict], timedelta(seconds=2 * PATIENCE))
                return self.store.get(verdict).decode()
        end, everyone = time.monotonic() + PATIENCE, range(self.ranks.world_size)
        while True:
            late = time.monotonic() > end
            self._fetch(self.processes, [f"process {rank}" for rank in everyone])
            reports = self.reports()
            states = {rank: self.state(rank) for rank in everyone if rank not in reports}
            for rank in [rank for rank, state in states.items() if state == "gone"]:
                if not self.ranks.has_parent or late:  # a parent knows how it ended
                    self.report("gone", gone=rank)
            reports = self.reports()
            states = {rank: state for rank, state in states.items() if rank not in reports}
            if self.signal:  # others may not have got one, and go on
                states = {rank: state for rank, state in states.items() if state == "stopped"}
            kinds = {report["kind"] for report in reports.values()}
            if late or kinds & {"own", "gone"} or all(state == "stopped" for state in states.values()):
                break
            time.sleep(0.05)
        line = judge(self, reports, states)[1]
        in_vain = any(report["waited"] for report in reports.values()) and "own" not in kinds
        if in_vain and self.store.add(f"killing on {self.host}", 1) == 1:
            show_and_kill([self._process(rank)[1] for rank, state in states.items() if state])
        if not self.signal:
            self.store.set(verdict, line)
        return line

    def has_killed(self):
        """Whether ranks of this machine that were stuck were killed by another one."""
        return self.store.check([f"killing on {self.host}"])

    def names(self, ranks):
        """Such as "rank 2, 3 on h1; rank 4 on h2"."""
        hosts = {}
        for rank in ranks:
            hosts.setdefault(self._process(rank)[0], []).append(rank)
        return few([f"rank {few(there)} on {host}" for host, there in hosts.items()], "; ", "machines more")

    def _process(self, rank):
        key = f"process {rank}"
        unknown = self.host if self.ranks.one_machine else "an unknown machine"
        return self._fetch(self.processes, [key]).get(key, [unknown, 0, None])

    def has_met(self, rank):
        return self._process(rank)[1] > 0

    def state(self, rank):
        """Of a rank's process: "gone", "stopped" or "running"; "" where this process cannot tell."""
        host, pid, space = self._process(rank)
        if sys.platform != "linux" or host != self.host or space != _process_space():
            return ""
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "gone"
        return {"Z": "gone", "X": "gone", "T": "stopped"}.get(state, "running")


def _process_space():
    """Containers number their processes by themselves."""
    return Path("/proc/self/ns/pid").stat().st_ino if sys.platform == "linux" else 0


def show_and_kill(pids):
    """Let processes that are stuck show their stacks, and kill them."""
    for number, pause in ((getattr(signal, "SIGUSR2", None), 0.5), (getattr(signal, "SIGKILL", None), 0)):
        for pid in pids if number else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause if pids else 0)


def is_lost(error):
    """Whether an exception says that other ranks were lost, as a consequence of what happened there."""
    words = "gloo/transport|Wait timeout"  # gloo's, and those of a store in a file
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(re.search(words, str(error))))

"""A rank that fails tells it: who, where and why, in one line, once on each machine, and all ranks end."""

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from common.errors import describe, leave_for_torchrun, process, stop_signals, write_error
from common.judge import PATIENCE, examine
from common.meeting import comes, deadline
from common.ranks import few

import torch.distributed as dist


class Watch:
    """What the ranks let each other know, through the store in which they meet: that they live, and how they failed.

    A report is a dict: "rank", "host"; "kind", see `judge`; "where" in its training the rank was; "why", in words;
    "details", a traceback or ""; "status", with which it exits; "waited", for how many seconds in vain, or 0; "ended",
    whether it had left the training. What N ranks ask of the store grows with N, not with its square: reports are
    numbered as they come, each is fetched once, and one rank of each machine judges for all there, or their parent.
    """

    def __init__(self, store, ranks, children=()):
        """children: the ranks' processes, where this one is their parent."""
        self.store, self.ranks, self.timeout = dist.PrefixStore("faults", store), ranks, 0  # until they have met
        self.ended, self.signal, self.host, self.server = False, None, socket.gethostname(), "rank 0"
        self.has_parent = ranks.launcher == "mp.spawn"  # which judges, and passes signals on
        self.serves = ranks.rank == 0 and not (ranks.serves_store or self.has_parent)
        self.children, self.fetched = children, {}  # of what is in the store
        for rank, child in enumerate(children):
            self.announce(rank, child.pid)

    def announce(self, rank, pid):
        """Let the others know the process of a rank; before they meet."""
        self.store.set(f"process {rank}", json.dumps([self.host, pid, _process_space()]))

    def begin(self, args):
        """Let signals that end this process come out as its fault; after all have met."""
        self.timeout, self.server = args.timeout, self.names([0])  # while the store can be asked
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGUSR2)  # shows the stacks
        faulthandler.enable()  # NCCL aborts a process whose collective takes too long
        # With NCCL no handler could run while this process waits for the others.
        if not self.has_parent and args.backend == "gloo":
            for number in stop_signals():
                signal.signal(number, self.receive)

    def receive(self, number, frame):
        """End this process by a signal."""
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C comes from the terminal, and from the parent or the launcher
        self.signal = signal.Signals(number)
        raise SystemExit(128 + number)

    def _fetch(self, keys):
        """The values of those of the keys that are there."""
        new = [key for key in keys if key not in self.fetched]
        if new and not self.store.check(new):
            new = [key for key in new if self.store.check([key])]
        if new:
            self.fetched.update(zip(new, map(json.loads, self.store.multi_get(new)), strict=True))
        return [self.fetched[key] for key in keys if key in self.fetched]

    # ---------------------------------------------------------------------------------------- all went well

    def all_leave(self, where):
        """Whether all ranks leave a loop here; waits for them, but not for ever: others may go on in it."""
        if self.store.add(f"leave {where}", 1) == self.ranks.world_size:
            self.store.set(f"all leave {where}", "")
        return comes(self.store, [f"all leave {where}"], min(30, self.timeout))

    def end_together(self, what="end"):
        """Wait until all ranks are here. Returns in one line who ended the training elsewhere than others, or "".

        what: for which end, where there are several. Raises `DistError` where one does not come within the timeout.
        """
        world_size, self.ended = self.ranks.world_size, True
        self.store.set(f"{what} {self.ranks.rank}", json.dumps(process.where()))
        if self.store.add(f"{what}s", 1) == world_size:
            ends = self._fetch([f"{what} {rank}" for rank in range(world_size)])
            others = [rank for rank in range(world_size) if ends[rank] != ends[0]]
            line = f"{self.names(others)} ended in {ends[others[0]]}, rank 0 in {ends[0]}" if others else ""
            self.store.set(f"all {what}s", line)
        self.store.wait([f"all {what}s"], timedelta(seconds=self.timeout))
        return self.store.get(f"all {what}s").decode()

    def stay(self, seconds=PATIENCE):
        """Let the rank that serves the store stay until the others need it no more."""
        self.store.add("left", 1)
        end = time.monotonic() + seconds
        while self.serves and self.store.add("left", 0) < self.ranks.world_size and time.monotonic() < end:
            time.sleep(0.01)

    # ------------------------------------------------------------------------------------------- one failed

    def tell(self, error):
        """Report the exception with which this rank ends, and tell who is to blame. Returns the exit status."""
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)  # a launcher may have seen sooner than this rank that one failed
        rank, local_rank = self.ranks.rank, self.ranks.local_rank
        server, lost_it = f"{self.server}, which serves the store,", f"rank {rank} lost it in {process.where()}"
        try:
            with deadline(3 * PATIENCE, f"{server} does not answer: {lost_it}"):
                kind, why, status, details = self._explain(error)
                waited = kind == "lost" and re.search("timed out|timeout", str(error), re.IGNORECASE)
                self.report(kind, why, status, details, self.timeout if waited else 0)
                if not self.has_parent and kind != "signal":
                    line = self.verdict()
                    leave_for_torchrun(why if kind == "own" else line, status, later=int(kind == "lost"))
                self.stay(PATIENCE if kind == "lost" else 1)
                return status
        except dist.DistError:
            # Rank 0 told its own fault, if it could. Of the others one on each machine tells that it is gone.
            if local_rank == (1 if rank == local_rank else 0):  # on rank 0's machine the next one
                write_error(f"{server} is gone: {lost_it}")
            return 1

    def _explain(self, error):
        """(kind of report, why, exit status, traceback or "") of the exception with which this rank ends."""
        if self.signal or isinstance(error, KeyboardInterrupt):
            number = self.signal or signal.SIGINT
            reports = self.reports()
            known = {report["kind"] for report in reports.values()} | set(self.silent(reports).values())
            lost = "TORCHELASTIC_RUN_ID" in os.environ and known & {"own", "gone"}  # for that torchrun ends all
            return "lost" if lost else "signal", number.name, 128 + number, ""
        words = "gloo/transport|Wait timeout"  # gloo's, and those of a store in a file
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and re.search(words, str(error))):
            return "lost", describe(error), 1, ""
        if hasattr(error, "exit_status"):
            return "own", str(error), error.exit_status, ""
        where, details = process.where(), ""
        if isinstance(error, SystemExit):
            why = f"left by sys.exit({error.code!r}), before the training was finished, in {where}"
        else:
            why, details = f"failed in {where}: {describe(error)}", "".join(traceback.format_exception(error))
        return "own", f"{self.names([self.ranks.rank])} {why}", 1, details

    def report(self, kind, why, status=1, details="", waited=0, gone=None):
        """Let the others know how this rank ended, or the rank `gone`, which cannot tell it any more."""
        report = {"rank": self.ranks.rank, "host": self.host, "where": process.where(), "ended": self.ended}
        report |= {"kind": kind, "why": why, "status": status, "details": details, "waited": waited}
        if gone is not None:
            report["rank"] = gone
            self.store.add("left", 1)
        self.store.set(f"report {self.store.add('reports', 1)}", json.dumps(report))

    def reports(self):
        """{rank: its first report} of the ranks that left one, in the order in which they came."""
        keys, found = [f"report {number + 1}" for number in range(self.store.add("reports", 0))], {}
        for report in self._fetch(keys):
            found.setdefault(report["rank"], report)
        return found

    def silent(self, reports):
        """{rank: state} of the ranks that left none of the reports and did not finish; see `state`."""
        everyone = range(self.ranks.world_size)
        self._fetch([f"process {rank}" for rank in everyone])
        states = {rank: self.state(rank) for rank in set(everyone) - set(reports)}
        return {rank: state for rank, state in sorted(states.items()) if state != "finished"}

    def verdict(self):
        """The line that tells who is to blame, which one rank of each machine finds and tells for all there."""
        key = f"verdict on {self.host}"
        if self.store.add(f"judges on {self.host}", 1) > 1 and comes(self.store, [key], 2 * PATIENCE):
            return self.store.get(key).decode()
        line, details, _ = examine(self)
        if self.store.add(f"tells on {self.host}", 1) == 1:  # else the judge was slow
            write_error(line, details)
        self.store.set(key, line)
        return line

    def names(self, ranks):
        """Such as "rank 2, 3 on h1; rank 4 on h2"."""
        hosts = {}
        for rank in ranks:
            hosts.setdefault(self.process(rank)[0], []).append(rank)
        return few([f"rank {few(there)} on {host}" for host, there in hosts.items()], "; ", "machines more")

    def process(self, rank):
        """[its machine, its process id, 0 where it is not known, where such numbers count]."""
        unknown = self.host if self.ranks.one_machine else "an unknown machine"
        return [*self._fetch([f"process {rank}"]), [unknown, 0, None]][0]

    def state(self, rank):
        """Of a rank's process: "running", "stopped", "gone"; to its parent also "finished"; "" where none can tell."""
        host, pid, space = self.process(rank)
        state = _process_state(pid) if host == self.host and space == _process_space() else ""
        if not self.children or state == "stopped":
            return state
        if (code := self.children[rank].exitcode) is None:
            return "running"
        return "finished" if code >= 0 and self.store.check([f"finished {rank}"]) else "gone"


def _process_state(pid):
    if sys.platform != "linux":
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return {"Z": "gone", "X": "gone", "T": "stopped"}.get(state, "running")


def _process_space():
    """Containers number their processes by themselves."""
    return Path("/proc/self/ns/pid").stat().st_ino if sys.platform == "linux" else 0

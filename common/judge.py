"""Who is to blame, by what the ranks report."""

import contextlib
import os
import signal
import time

from common.ranks import few

KINDS = "own", "gone", "signal", "lost"
PATIENCE = 4  # seconds in which the ranks that live report


def examine(watch):
    """Wait for the ranks' reports, and judge. Returns (line to tell, traceback above it, exit status).

    Where others were waited for in vain, ends the processes of this machine that are stuck; they show where before.
    """
    end = time.monotonic() + PATIENCE
    while True:
        late = time.monotonic() > end
        for rank in [rank for rank, state in watch.silent(watch.reports()).items() if state == "gone"]:
            watch.report("gone", *how_ended(watch.children[rank].exitcode if watch.children else None), gone=rank)
        reports = watch.reports()
        states = watch.silent(reports)
        kinds = {report["kind"] for report in reports.values()}
        # A parent lets all end by themselves, and so learns where they lost one that is gone.
        known = kinds & {"own", "gone"} and not watch.children
        if late or known or all(state == "stopped" for state in states.values()):
            break
        time.sleep(0.05)
    blamed, line = judge(watch, reports, states)
    if "own" not in kinds and any(report["waited"] for report in reports.values()):
        show_and_kill([watch.process(rank)[1] for rank, state in states.items() if state])
    told = reports[blamed if blamed in reports else next(iter(reports))]
    return line, told["details"] if told["host"] == watch.host else "", told["status"]


def judge(watch, reports, states):
    """(the rank to blame or None, what to tell of it).

    reports: {rank: report}, at least one, of the kinds "own", a fault of its own; "lost", it lost others; "signal", one
    ended it; "gone", as others saw. states: {rank: state} of those without a report, see `Watch.state`.
    """
    kinds = {kind: [rank for rank in reports if reports[rank]["kind"] == kind] for kind in KINDS}
    lost = sorted(kinds["lost"], key=lambda rank: reports[rank]["ended"])  # those still in their training know where
    where = f" in {reports[lost[0]]['where']}" if lost else ""
    waited = max(report["waited"] for report in reports.values())
    for rank in kinds["own"]:
        return rank, reports[rank]["why"]
    for rank in kinds["gone"]:
        return rank, f"{watch.names(kinds['gone'])} {reports[rank]['why']}{where}"
    for rank in kinds["signal"] if not waited else []:  # where all got one, there is nothing to tell
        line = f"{watch.names([rank])} was ended by {reports[rank]['why']} in {reports[rank]['where']}"
        return rank, line if lost or states else ""
    if not waited:  # some rank has died, and those that run wait for such as this one
        states = {rank: state for rank, state in states.items() if state != "running"} or states
    for rank, state in states.items():
        how, why = f"has not answered for {waited:g} s" if waited else "does not answer", ""
        if waited and state == "stopped":
            why = ": it was stopped by a signal"
        elif waited and state == "running":
            why = ": it does something else, see its stack above"
        return rank, f"{watch.names(states)} {how}{where}{why}"
    for rank in [rank for rank in reports if reports[rank]["ended"]]:
        return rank, f"{watch.names([rank])} ended its training in {reports[rank]['where']}, others are{where}"
    places = {}
    for rank in sorted(lost):
        places.setdefault(reports[rank]["where"], []).append(rank)
    each = ", ".join(f"rank {few(there)} in {place}" for place, there in places.items())
    return None, f"the ranks lost each other: {each} ({reports[lost[0]]['why']})"


def how_ended(code):
    """How a process ended by its exit code, if that is known, in words; and the status for it, as shells have it."""
    if code is None:
        return "is gone, killed or ended by itself,", 1
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}", 128 - code
    return f"left with status {code} before its training was finished", code or 1


def show_and_kill(pids):
    """Let processes that are stuck show their stacks, and kill them."""
    for number, pause in ((getattr(signal, "SIGUSR2", None), 0.5), (getattr(signal, "SIGKILL", None), 0)):
        for pid in pids if number else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause if pids else 0)

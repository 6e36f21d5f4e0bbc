"""Who is to blame, by what the ranks report."""

from common.waiting import few


def judge(watch, reports, states):
    """(the rank to blame or None, what to tell of it).

    reports: {rank: report}, of the kinds "own", a fault of its own; "lost", it lost others; "signal", one ended it;
    "gone", as others saw. states: {rank: "running", "stopped" or ""} of those without a report.
    """
    kinds = {kind: [rank for rank in reports if reports[rank]["kind"] == kind] for kind in ("own", "gone", "signal")}
    lost = {rank: report for rank, report in reports.items() if report["kind"] == "lost"}
    waited = max((report["waited"] for report in reports.values()), default=0)
    in_training = [report["where"] for report in lost.values() if not report["ended"]]
    where = "".join(f" in {place}" for place in (in_training or [report["where"] for report in lost.values()])[:1])
    if kinds["own"]:
        return kinds["own"][0], reports[kinds["own"][0]]["why"]
    if blamed := kinds["gone"]:
        how = reports[blamed[0]]["why"] or "is gone, killed or ended by itself,"
        return blamed[0], f"{watch.names(blamed)} {how}{where}"
    if not waited:  # some rank has died, and those that run wait for such as this one
        states = {rank: state for rank, state in states.items() if state != "running"} or states
    if blamed := list(states):
        how = f"has not answered for {waited:g} s" if waited else "does not answer"
        whys = {
            "stopped": ": it was stopped by a signal",
            "running": ": it does something else, see its stack above",
        }
        return blamed[0], f"{watch.names(blamed)} {how}{where}{whys.get(states[blamed[0]], '') if waited else ''}"
    for rank in [rank for rank in reports if reports[rank]["ended"] and lost]:
        return rank, f"{watch.names([rank])} ended its training in {reports[rank]['where']}, others are{where}"
    for rank in kinds["signal"] if lost else []:
        return rank, f"{watch.names([rank])} was ended by {reports[rank]['why']} in {reports[rank]['where']}"
    if not lost:
        return None, ""
    places = {}
    for rank in sorted(lost):
        places.setdefault(lost[rank]["where"], []).append(rank)
    each = ", ".join(f"rank {few(there)} in {place}" for place, there in places.items())
    return None, f"the ranks lost each other: {each} ({next(iter(lost.values()))['why']})"

"""A rank that fails tells it: who, where and why, in one line, once on each machine, and all ranks end."""

import os
import re
import signal
import sys
import threading
import traceback

from common import errors
from common.errors import UserError, describe, leave_for_torchrun, process, stop_signals, write_error
from common.watch import PATIENCE, is_lost

import torch.distributed as dist


def tell(error):
    """Tell of the exception that ends a process. Returns the exit status."""
    status = _tell_after_meeting(error) if process.watch else errors.tell(error)
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and "DDP_AGENT" not in os.environ
    if restarts and status == UserError.exit_status and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun would try again and again what cannot succeed
    return status


def _tell_after_meeting(error):
    """Report the exception with which this rank ends, and tell who is to blame. Returns the exit status."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # a launcher may have seen sooner than this rank that one failed
    watch, rank, local_rank = process.watch, process.watch.ranks.rank, process.watch.ranks.local_rank
    served = f"{watch.server}, which serves the store, {{}}: rank {rank} lost it in {process.where()}"

    def give_up():
        write_error(served.format("does not answer"))
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(3 * PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    try:
        kind, line, status, details = _explain(watch, error)
        waited = kind == "lost" and re.search("timed out|timeout", str(error), re.IGNORECASE)
        watch.report(kind, line, watch.timeout if waited else 0)
        if kind == "signal" and "TORCHELASTIC_RUN_ID" not in os.environ:
            line = ""  # else torchrun ends all, perhaps since one is gone
        elif kind != "own":
            line = watch.examine()
        if line and watch.first():
            write_error(line, details)
        if kind != "signal":
            leave_for_torchrun(line, later=int(kind == "lost"))
        watch.stay(PATIENCE if kind == "lost" else 1)
        return status
    except dist.DistError:
        # Rank 0 told its own fault, if it could. Of the others one on each machine tells that it is gone.
        if local_rank == (1 if rank == local_rank else 0):  # on rank 0's machine the next one
            write_error(served.format("is gone"))
        return 1
    finally:
        timer.cancel()


def _explain(watch, error):
    """(kind of report, why, exit status, traceback or "") of the exception with which this rank ends."""
    if watch.signal or isinstance(error, KeyboardInterrupt):
        number = watch.signal or signal.SIGINT
        return "signal", number.name, 128 + number, ""
    if is_lost(error):
        return "lost", describe(error), 1, ""
    if hasattr(error, "exit_status"):
        return "own", str(error), error.exit_status, ""
    name, where = watch.names([watch.ranks.rank]), process.where()
    if isinstance(error, SystemExit):
        return "own", f"{name} left by sys.exit({error.code!r}), before the training was finished, in {where}", 1, ""
    return "own", f"{name} failed in {where}: {describe(error)}", 1, "".join(traceback.format_exception(error))

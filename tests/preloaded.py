"""Starts scripts, each forked from this process, which has imported torch once. Reads and writes JSON lines.

{"argv": [script, option, …], "env": {…}, "cwd": …, "out": path, "err": path} starts one; the answer is its pid.
{"wait": pid, "limit": seconds} waits for one; the answer is its status, or null where it still runs.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path


def become(argv, env, cwd, out, err):
    """Run a script in this process, as if Python had just been started for it."""
    os.setsid()
    for number, path, flags in (0, "/dev/null", os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY):
        os.dup2(os.open(path, flags | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # what was found out with the other environment
    sys.argv, sys.path[0] = argv, str(Path(cwd, argv[0]).parent)
    status = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # As the interpreter ends, but for tearing down all modules, which takes longer than a short run.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def spawn(function, *args, **options):
    """mp.spawn whose processes are forked, and start as those of mp.spawn do."""

    def child(*args):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        function(*args)

    return mp.start_processes(child, *args, start_method="fork", **options)


def wait(pid, limit):
    end = time.monotonic() + limit
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1]) if ended[0] else None


if __name__ == "__main__":
    # What the first training step, DDP and the scripts import, but nothing of `common`: each kit has its own.
    import torch._dynamo
    import torch.distributed.nn  # noqa: F401
    import torch.multiprocessing as mp
    import tqdm  # noqa: F401

    gc.freeze()  # spares each child to look through all of that
    mp.spawn = spawn
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = wait(order["wait"], order["limit"])
        elif not (answer := os.fork()):
            become(**order)  # does not return
        print(json.dumps(answer), flush=True)

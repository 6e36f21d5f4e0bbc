"""Runs scripts many times over: imports torch once, and forks for each run. Reads and writes JSON lines.

A run is {"argv": [script, option, …], "env": {…}, "cwd": …, "limit": seconds}; the answer is {"status", "out", "err"},
whose status is "hang" after the limit.
"""

import json
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path


def run(argv, env, cwd, limit):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(env)
            os.chdir(cwd)
            sys.argv = argv
            status = 0
            try:
                runpy.run_path(argv[0], run_name="__main__")
            except SystemExit as exit_:
                status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        end = time.monotonic() + limit
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.005)
        if ended[0]:
            status = os.waitstatus_to_exitcode(ended[1])
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = "hang"
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return {"status": status, "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    import torch.utils.data  # noqa: F401 - for the children

    from common import run as _  # noqa: F401 - for the children

    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)

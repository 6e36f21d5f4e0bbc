"""What the scripts share."""

import gc
import signal
import sys
import time
from pathlib import Path

began = time.time()  # of this process, about: torch takes longer to import than all before
script = Path(sys.argv[0])
if script.is_file() and "\n@entry\n" in script.read_text("utf-8", "replace"):
    # Such a script imports this first. torch takes long, and Ctrl-C would show the stack of an import: until `entry`
    # sets Python's handler again, it ends the process without a word.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # until `entry`: what is imported stays, and torch comes a tenth sooner
    import torch

# Said here, before a module imports of it what may be missing. ddp_multinode.sh does without torch at first.
if torch := sys.modules.get("torch"):
    too_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
    if too_old or not torch.distributed.is_available():
        why = "is too old" if too_old else "was built without torch.distributed"
        sys.stderr.write(f"error: torch {torch.__version__} {why}: these scripts need torch 2.6 or newer, with it\n")
        sys.exit(2)

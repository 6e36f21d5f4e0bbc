"""What the scripts share."""

import sys

# The scripts import torch before this. Said here, before a module imports of it what may be missing.
if torch := sys.modules.get("torch"):
    too_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)
    if too_old or not torch.distributed.is_available():
        why = "is too old" if too_old else "was built without torch.distributed"
        sys.stderr.write(f"error: torch {torch.__version__} {why}: these scripts need torch 2.6 or newer, with it\n")
        sys.exit(2)

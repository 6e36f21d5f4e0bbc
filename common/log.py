"""What was measured, for programs and for TensorBoard."""

import hashlib
import json
import math

from common import ranks
from common.errors import RunError, UserError

import torch


class Log:
    """Metrics for programs (one JSON object a line) and for TensorBoard, written by rank 0 alone."""

    def __init__(self, args):
        self.args, self.wanted, self.lines, self.board = args, bool(args.metrics or args.tensorboard), None, None

    def open(self):
        """Raises `UserError` where it cannot write, and leaves nothing behind then."""
        metrics, option = self.args.metrics, f"--metrics {self.args.metrics}"
        new = metrics and not metrics.exists()
        try:
            if metrics:
                if metrics.is_file() and metrics.open("rb").read(1) not in (b"", b"{"):
                    raise UserError(f"{option}: there is a file of another kind, which is kept")
                self.lines = metrics.open("a", buffering=1, encoding="utf-8")
            if self.args.tensorboard:
                option = f"--tensorboard {self.args.tensorboard}"
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(self.args.tensorboard)
        except (ImportError, OSError, UnicodeError) as error:
            if new and self.lines:
                metrics.unlink()
            raise UserError(f"{option}: {getattr(error, 'strerror', None) or error}") from None
        self.write("start", {}, **vars(self.args), torch=torch.__version__, world_size=ranks.world_size())

    def write(self, event, measured, **values):
        """Write what was measured, {name: number or scalar tensor}, with the event's own values.

        A name that the event has itself, such as the score `loss` at the end, gets the prefix `test_`.
        """
        measured = {name: value.item() if hasattr(value, "item") else value for name, value in measured.items()}
        if self.lines:
            line = {"event": event, **values}
            line |= {f"test_{name}" if name in line else name: value for name, value in measured.items()}
            for name, value in line.items():
                if isinstance(value, float) and not math.isfinite(value):
                    line[name] = str(value)  # JSON has no nan and no inf
            try:
                self.lines.write(json.dumps(line, default=str) + "\n")
            except OSError as error:
                raise RunError(f"--metrics {self.args.metrics}: {error.strerror}") from None
        if self.board and event != "end":
            for name, value in measured.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(f"{values['set']}/{name}" if "set" in values else name, value, values["step"])
            self.board.flush()


def weights_sha256(model):
    """Digest of the parameters' bytes in the order of `state_dict`, gathered where they are sharded."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

"""The job: model, data, optimizer, loss and scores. Put your own here; the scripts use just the names below."""

import warnings
import zlib
from pathlib import Path

from common.errors import UserError

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

DIGITS = Path(__file__).parent.parent / "data" / "digits.csv.gz"

collate = None  # the loaders' `collate_fn`; None: torch's own


class ToyModel(nn.Module):
    """A small classifier: float [batch, 64] -> logits [batch, 10]."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(64, 64)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(64, 10)

    def forward(self, pixels):
        return self.net2(self.relu(self.net1(pixels)))


class ToyMpModel(ToyModel):
    """`ToyModel` with its first layer on `dev0` and its last on `dev1`; the logits are on `dev1`.

    The layers are made on the CPU in the same order, so that the same seed gives the same weights.
    """

    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net1.to(dev0)
        self.net2.to(dev1)

    def forward(self, pixels):
        hidden = self.relu(self.net1(pixels.to(self.dev0)))
        return self.net2(hidden.to(self.dev1))


def load_data():
    """(train set, test set), of samples (pixels: float [64] from 0 to 1, label: int64 from 0 to 9).

    A fifth of each digit's samples, chosen with a fixed seed, is the test set. Pixels have torch's default dtype.
    Raises `UserError`, which is told in one line, without a traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # numpy's, where the file is empty
            table = torch.from_numpy(numpy.loadtxt(DIGITS, dtype=numpy.int64, delimiter=",", ndmin=2))
    except (OSError, EOFError, ValueError, UserWarning, zlib.error) as error:
        raise UserError(f"{DIGITS}: {getattr(error, 'strerror', None) or error}") from None
    if table.shape[1:] != (65,) or not 0 <= table.min() <= table.max() <= 16 or table[:, 64].max() > 9:
        raise UserError(f"{DIGITS}: each row needs 64 grey levels from 0 to 16, and a digit")
    pixels, labels = table[:, :64] / 16, table[:, 64]

    shuffle = torch.Generator().manual_seed(0)
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        samples = (labels == digit).nonzero().flatten()
        chosen = torch.randperm(len(samples), generator=shuffle)[: round(len(samples) / 5)]
        in_test[samples[chosen]] = True
    return TensorDataset(pixels[~in_test], labels[~in_test]), TensorDataset(pixels[in_test], labels[in_test])


def make_optimizer(model, args, steps):
    """(optimizer, schedule), which the script steps after each optimizer step; the run takes `steps` of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))  # linear warm-up
    return optimizer, schedule


def loss(outputs, labels):
    """Mean over the batch, a scalar; outputs: float [batch, 10], labels: int64 [batch]."""
    return F.cross_entropy(outputs, labels)


def score(outputs, labels):
    """{name: sum over the samples of the batch, a scalar}; the run reports the means over all samples."""
    losses = F.cross_entropy(outputs, labels, reduction="sum")
    return {"accuracy": (outputs.argmax(1) == labels).sum(), "loss": losses}

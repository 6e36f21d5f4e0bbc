"""The job: model, data, loss and score. Put your own here; the scripts use just the names below."""

import gzip
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

DIGITS = Path(__file__).parent.parent / "data" / "digits.csv.gz"


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


class DataError(Exception):
    """Something is wrong with the data. An exception with an `exit_status` is told in one line, without a traceback."""

    exit_status = 2


def read_digits(path):
    """Return int64 [samples, 65] of 64 grey levels from 0 to 16 and a digit. Raises `DataError`."""
    table = []
    try:
        with gzip.open(path, "rt", encoding="ascii") as rows:
            for row in rows:
                values = [int(value) for value in row.split(",")]
                if len(values) != 65:
                    raise ValueError(f"{len(values)} values, not 65")
                if not 0 <= min(values[:64]) <= max(values[:64]) <= 16 or not 0 <= values[64] <= 9:
                    raise ValueError("a grey level is not from 0 to 16, or the digit not from 0 to 9")
                table.append(values)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise DataError(f"{path}, line {len(table) + 1}: {error}") from None
    if not table:
        raise DataError(f"{path} has no rows")
    return torch.tensor(table)


def load_data():
    """Return (train set, test set) of samples (pixels: float [64] from 0 to 1, label: int64 from 0 to 9).

    A fifth of each digit's samples, chosen with a fixed seed, is the test set. Pixels have torch's default dtype.
    Raises `DataError`.
    """
    table = read_digits(DIGITS)
    pixels, labels = table[:, :64] / 16, table[:, 64]

    shuffle = torch.Generator().manual_seed(0)
    in_test = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        samples = (labels == digit).nonzero().flatten()
        chosen = torch.randperm(len(samples), generator=shuffle)[: round(len(samples) / 5)]
        in_test[samples[chosen]] = True
    return TensorDataset(pixels[~in_test], labels[~in_test]), TensorDataset(pixels[in_test], labels[in_test])


def loss(outputs, labels):
    """Mean loss over the batch, a scalar; outputs: float [batch, 10], labels: int64 [batch]."""
    return F.cross_entropy(outputs, labels)


def score(outputs, labels):
    """How many samples of the batch are right, a scalar; shapes as for `loss`."""
    return (outputs.argmax(1) == labels).sum()

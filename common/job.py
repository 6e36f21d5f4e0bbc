"""The job: model, data, loss and score. Put your own here; the scripts use just the names below."""

import gzip
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


def load_data():
    """Return (train set, test set) of samples (pixels: float [64] from 0 to 1, label: int64 from 0 to 9).

    A fifth of each digit's samples, chosen with a fixed seed, is the test set. Pixels have torch's default dtype.
    """
    with gzip.open(DIGITS, "rt") as rows:
        table = torch.tensor([[int(value) for value in row.split(",")] for row in rows])
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

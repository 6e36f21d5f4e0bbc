"""A convolution net on randomly shifted digits, for `--lr 0.003`: batch normalization, dropout, Adam and StepLR."""

from pathlib import Path

from common.data import RandomBySample

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

DIGITS = Path(__file__).parent.parent / "data" / "digits.csv.gz"

collate = None


class ToyModel(nn.Module):
    """float [batch, 1, 8, 8] -> logits [batch, 10]."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(16 * 2 * 2, 10))

    def forward(self, images):
        return self.classifier(self.features(images))


class ToyMpModel(ToyModel):
    """The convolutions on `dev0`, the classifier and the logits on `dev1`."""

    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.features.to(dev0)
        self.classifier.to(dev1)

    def forward(self, images):
        return self.classifier(self.features(images.to(self.dev0)).to(self.dev1))


class Shifted(Dataset):
    """Each image moved at random by up to one pixel in each direction; what comes in at the edge is empty."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        top, left = torch.randint(0, 3, (2,)).tolist()
        return F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8], label


def load_data():
    """(train set, test set), of samples (image: float [1, 8, 8] from 0 to 1, digit)."""
    table = torch.from_numpy(numpy.loadtxt(DIGITS, dtype=numpy.int64, delimiter=","))
    images, labels = table[:, :64].view(-1, 1, 8, 8) / 16, table[:, 64]
    train_set, test_set = TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])
    return RandomBySample(Shifted(train_set)), test_set


def make_optimizer(model, args, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-4)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, max(1, steps // args.epochs), gamma=0.5)  # by epoch


def loss(outputs, labels):
    return F.cross_entropy(outputs, labels)


def score(outputs, labels):
    losses = F.cross_entropy(outputs, labels, reduction="sum")
    return {"accuracy": (outputs.argmax(1) == labels).sum(), "loss": losses}

"""The sum of a sequence, from noisy parts, for `--lr 0.01`: dictionaries, a collate, keywords, several outputs."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Net(nn.Module):
    """x: float [batch, length, 3], mask: [batch, length], 1 where x counts -> (mean, log variance), both [batch]."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(16, 2))

    def encode(self, *, x, mask):
        return (self.encoder(x) * mask.unsqueeze(2)).sum(1)

    def forward(self, *, x, mask):
        return self.head(self.encode(x=x, mask=mask)).unbind(1)


class ToyModel(nn.Module):
    """The kit calls a model with the inputs as they are collated, a dict."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, inputs):
        return self.net(**inputs)


class ToyMpModel(ToyModel):
    """The encoder on `dev0`, the head and the outputs on `dev1`."""

    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.net.encoder.to(dev0)
        self.net.head.to(dev1)

    def forward(self, inputs):
        hidden = self.net.encode(**{name: value.to(self.dev0) for name, value in inputs.items()})
        return self.net.head(hidden.to(self.dev1)).unbind(1)


class Sequences(Dataset):
    """Samples ({"x": float [length, 3], "mask": bool [length]}, (target, weight)), of lengths from 2 to 6."""

    def __init__(self, size, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.samples = [self.make() for _ in range(size)]

    def make(self):
        length = int(torch.randint(2, 7, (), generator=self.generator))
        x = torch.randn(length, 3, generator=self.generator, dtype=torch.float64)
        mask = torch.rand(length, generator=self.generator) < 0.8
        target = (x.sum(1).tanh() * mask).sum() + 0.1 * torch.randn((), generator=self.generator)
        return {"x": x, "mask": mask}, (target, 1 + mask.sum() / 6)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def load_data():
    return Sequences(500, seed=0), Sequences(100, seed=1)


def collate(samples):
    """Pads the sequences to the longest of the batch, in torch's default dtype."""
    inputs, labels = zip(*samples, strict=True)
    dtype = torch.get_default_dtype()
    padded = {name: pad_sequence([one[name] for one in inputs], batch_first=True).to(dtype) for name in inputs[0]}
    return padded, tuple(torch.stack(one).to(dtype) for one in zip(*labels, strict=True))


def make_optimizer(model, args, steps):
    """For the encoder; the script makes a second one, for the head."""
    optimizer = torch.optim.SGD(model.net.encoder.parameters(), lr=args.lr, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)


def losses(outputs, labels):
    (mean, log_variance), (target, weight) = outputs, labels
    return weight * F.gaussian_nll_loss(mean, target, log_variance.exp(), reduction="none")


def loss(outputs, labels):
    return losses(outputs, labels).mean()


def score(outputs, labels):
    return {"loss": losses(outputs, labels).sum(), "squared_error": (outputs[0] - labels[0]).square().sum()}

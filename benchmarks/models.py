"""The sizes of job that are compared: the kit's own, one where communication dominates, one where computing does."""

from torch import nn

BATCHES = {"default": 96, "epochs": 96, "wide": 16, "conv": 96, "conv, large batch": 768}  # global
RATES = {size: 0.01 for size in BATCHES} | {"default": 0.2, "epochs": 0.2}  # learning rates


class WideModel(nn.Sequential):
    """2.2 million parameters for a batch of few samples: float [batch, 64] -> logits [batch, 10]."""

    def __init__(self):
        super().__init__(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10))


class ConvModel(nn.Sequential):
    """29 thousand parameters, each used at many places; shapes as above."""

    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)),
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1024, 10)),
        )


OTHERS = {"wide": WideModel, "conv": ConvModel, "conv, large batch": ConvModel}  # than the kit's ToyModel

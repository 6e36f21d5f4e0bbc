"""A GPT of two layers on the characters of Python's argparse.py, for `--lr 0.01`: tied weights, AdamW, a cosine."""

import argparse
import inspect
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

VOCABULARY, CONTEXT, WIDTH, HEADS = 128, 32, 32, 4  # ASCII

collate = None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class ToyModel(nn.Module):
    """Tokens, int64 [batch, length] -> logits [batch, length, VOCABULARY]."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block1, self.block2, self.norm = Block(), Block(), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.lm_head.weight = self.tokens.weight  # tied

    def embed(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, tokens):
        return self.lm_head(self.norm(self.block2(self.block1(self.embed(tokens)))))


class ToyMpModel(ToyModel):
    """The first block on `dev0`, the second and the logits on `dev1`. The tied weights are on `dev0`."""

    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0, self.dev1 = dev0, dev1
        self.to(dev0)
        self.block2.to(dev1)
        self.norm.to(dev1)

    def forward(self, tokens):
        hidden = self.block1(self.embed(tokens.to(self.dev0)))
        hidden = self.norm(self.block2(hidden.to(self.dev1)))
        return self.lm_head(hidden.to(self.dev0)).to(self.dev1)


def load_data():
    """(train set, test set), of windows: (characters, the character after each), both int64 [CONTEXT]."""
    text = Path(inspect.getsourcefile(argparse)).read_text(encoding="utf-8")
    codes = torch.tensor(list(text[:20_001].encode("ascii", "replace")))
    inputs, labels = codes[:-1].view(-1, CONTEXT), codes[1:].view(-1, CONTEXT)
    return TensorDataset(inputs[:500], labels[:500]), TensorDataset(inputs[500:], labels[500:])


def make_optimizer(model, args, steps):
    """Weight decay for matrices alone; a warm-up of a tenth of the steps, and a cosine down to 0."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    warm_up = max(1, steps // 10)
    schedules = [LinearLR(optimizer, 0.1, total_iters=warm_up), CosineAnnealingLR(optimizer, max(1, steps - warm_up))]
    return optimizer, SequentialLR(optimizer, schedules, milestones=[warm_up])


def loss(outputs, labels):
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def score(outputs, labels):
    """Each sample's mean over its characters, summed over the samples."""
    losses = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
    return {"loss": losses.mean(1).sum(), "token_accuracy": (outputs.argmax(2) == labels).double().mean(1).sum()}

"""Stands in for `common/job.py` in the benchmarks' copy of the kit: jobs of several sizes, and a turn for each program.

The programs that are compared call just what a user's own job has, so they run as they are. After its first optimizer
step each process reports to `programs.py`, and from then on takes as many steps as it is told to, and waits again.
"""

import argparse
import os
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

from common import digits, models

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

ADDRESS, SIZE = os.environ["BENCHMARK_ADDRESS"], os.environ["BENCHMARK_SIZE"]
BATCH = int(os.environ["BENCHMARK_BATCH"])  # global
LR = models.RATES[SIZE]
EPOCHS = int(os.environ["BENCHMARK_EPOCHS"])  # most programs are killed when all is measured

collate, loss, score, ToyMpModel = digits.collate, digits.loss, digits.score, digits.ToyMpModel
stamps = {"imports": time.time()}  # when what was done; seconds since the epoch


class Digits(Dataset):
    """The train set over and over, so that no epoch ends while steps are measured."""

    def __init__(self, digits):
        self.digits = digits

    def __len__(self):
        return 2_000_000

    def __getitem__(self, index):
        return self.digits[index % len(self.digits)]


def load_data():
    stamps.setdefault("joining", time.time())
    train_set, test_set = digits.load_data()
    # "epochs" is the default job as it is: epochs of 14 steps, and an evaluation after each.
    return train_set if SIZE == "epochs" else Digits(train_set), test_set


def ToyModel():
    stamps.setdefault("data", time.time())
    return models.OTHERS.get(SIZE, digits.ToyModel)()


def make_optimizer(model, args=argparse.Namespace(lr=LR), steps=None):  # noqa: B008  nobody changes it
    """The toy job's (optimizer, schedule), so that all programs do the same work; the peers have no `args`."""
    return digits.make_optimizer(model, args, steps)


def process_began():
    """When this process was started, to 10 ms; where there is no /proc, when Python read this file."""
    if sys.platform != "linux":
        return stamps["imports"]
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def peak_memory():
    """Of this process, in MiB; 0 where there is no /proc."""
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else "VmHWM: 0"
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Turns:
    """Waits for its turn after the first optimizer step and after each block of steps."""

    def __init__(self):
        self.left, self.connection = 1, None

    def __call__(self, optimizer, args, kwargs):
        self.left -= 1
        if self.left:
            return
        now = time.perf_counter()
        if self.connection is None:
            stamps.setdefault("first step", time.time())
            stamps["process"] = process_began()
            self.connection = Client(ADDRESS)
            self.connection.send(stamps)
        else:
            weights = sum(value.sum().item() for group in optimizer.param_groups for value in group["params"])
            self.connection.send((now - self.start, weights, peak_memory()))
        try:
            self.left = self.connection.recv()
        except EOFError:  # it is over
            os._exit(0)
        self.start = time.perf_counter()


def first_forward(module, inputs):
    stamps.setdefault("DDP", time.time())
    handle.remove()


handle = register_module_forward_pre_hook(first_forward)
register_optimizer_step_post_hook(Turns())

"""How samples are loaded: what they draw at random, and the loader's workers."""

import random
import signal
from multiprocessing import util

from common import states
from common.errors import stop_signals
from common.start import die_with_parent, signals_held

import numpy
import torch
from torch.utils.data import DataLoader, Dataset


class RandomBySample(Dataset):
    """A dataset that augments at random, made random by sample, not by rank.

    What `dataset[index]` draws from `random`, `numpy.random` and torch's default generator depends on --seed, the epoch
    and the index alone: it is the same at every world size, with any --workers, and after a resume. It is to be the
    outermost wrapper. The sampler hands it the index plus the epoch times the length.
    """

    seed = 0  # `train_loader` sets it

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        epoch, index = divmod(index, len(self.dataset))
        number, more = map(int, numpy.random.SeedSequence((self.seed, epoch, index)).generate_state(2, "uint64"))
        python, array = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)  # torch.manual_seed would seed the accelerators too
            random.seed(number)
            numpy.random.seed(more % 2**32)
            try:
                return self.dataset[index]
            finally:
                random.setstate(python)
                numpy.random.set_state(array)


class RandomByBatch(Dataset):
    """A dataset in loader workers. What a batch draws depends on --seed, the epoch and its first index alone.

    So it is the same after a resume. The sampler hands it indices as it does to `RandomBySample`.
    """

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, indices):
        states.seed(self.seed, indices[0])
        if not isinstance(self.dataset, RandomBySample):
            size = len(self)
            indices = [index % size for index in indices]
        several = getattr(self.dataset, "__getitems__", None)
        return several(indices) if several else [self.dataset[index] for index in indices]


def inside(dataset):
    """A dataset, what it holds where it is a wrapper such as Subset and ConcatDataset, and what these hold."""
    found = [dataset]
    for one in found:
        held = [getattr(one, "dataset", None), *getattr(one, "datasets", [])]
        found += [dataset for dataset in held if dataset is not None]
    return found


def make_loader(dataset, args, device, collate, **sampling):
    """A DataLoader; sampling: its batch_size and sampler, or its batch_sampler."""
    return DataLoader(
        RandomByBatch(dataset, args.seed) if args.workers else dataset,
        **sampling,
        collate_fn=collate,
        num_workers=args.workers,
        pin_memory=device.type != "cpu",
        persistent_workers=args.workers > 0,
        worker_init_fn=start_worker,
        timeout=args.timeout if args.workers else 0,
    )


def start_worker(_worker):
    die_with_parent()
    # Ctrl-C and schedulers signal all processes, but this one's rank needs its batches until all ranks stop.
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def iterate(loader):
    """`iter(loader)`, which draws a seed for the workers, without a trace in the random state."""
    with torch.random.fork_rng(devices=[]):
        if not loader.num_workers:
            return iter(loader)
        util.get_temp_dir()  # which they share then; else each has its own, and leaves it when it is killed
        attributes = [item for one in inside(loader.dataset) for item in getattr(one, "__dict__", {}).items()]
        attributes = [(name, value) for name, value in attributes if isinstance(value, (int, float, str))]
        if attributes != vars(loader).setdefault("known", attributes):  # the script has set one, such as the epoch
            loader.known, loader._iterator = attributes, None  # new workers, which have copies of the dataset
        with signals_held():
            return iter(loader)

"""The data: which samples a rank sees in which step, at any world size and from any step on."""

import math
import random
import signal
from multiprocessing import util

from common import ranks
from common.errors import UserError, stop_signals
from common.start import die_with_parent, signals_held

import numpy
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler


def check_sets(*sets, names=("train set", "test set")):
    """Return the sets. Raises `UserError` where one is empty, has no length, or another one on another machine."""
    for name, data in zip(names, sets, strict=True):
        if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise UserError(
                f"the {name} is a {type(data).__name__}, which has no samples to choose from, as each rank does: give "
                "a dataset with __len__ and __getitem__"
            )
        ranks.check_same(f"the size of the {name}", len(data))
        if not len(data):
            raise UserError(f"the {name} is empty: see load_data in common/job.py")
    return sets


class ResumableSampler(Sampler):
    """This rank's share of each epoch, from any step on, so that step k sees the same samples at any world size.

    The order is that of torch's `DistributedSampler(shuffle=True, drop_last=True)` with the same seed and epoch. What
    does not fill a global batch at the end of an epoch is left out. Raises `UserError` where the samples do not fill
    one global batch, or the global batch cannot be shared out evenly.
    """

    def __init__(self, dataset, args):
        self.size, self.seed, self.batch, self.rank = len(dataset), args.seed, args.batch_size, ranks.rank()
        self.world_size = ranks.world_size()
        self.micro_batch, rest = divmod(self.batch, self.world_size * args.accum)  # samples per process at a time
        if rest:
            nearest = [self.batch - rest, self.batch - rest + self.world_size * args.accum]
            raise UserError(
                f"--batch-size {self.batch} does not divide into {self.world_size} processes × {args.accum} "
                f"micro-batches: the nearest that does is {' or '.join(str(size) for size in nearest if size)}"
            )
        if self.size < self.batch:
            raise UserError(f"--batch-size {self.batch} is more than the {self.size} samples of the train set")
        self.by_epoch = isinstance(dataset, RandomBySample)
        self.steps = self.size // self.batch  # per epoch
        self.total_steps = min(args.steps or math.inf, args.epochs * self.steps)  # of the run
        self.set_epoch(0)

    def set_epoch(self, epoch, step=0):
        """Choose the epoch, and the step in it with which the next iteration begins."""
        self.epoch, self.step = epoch, step

    def __len__(self):
        return (self.steps - self.step) * self.batch // self.world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        # The order is the same with 32 bits, in half of the memory, of which this rank keeps its share alone.
        dtype = torch.int32 if self.size < 2**31 else torch.int64
        order = torch.randperm(self.size, generator=generator, dtype=dtype)
        order = order[self.step * self.batch + self.rank : self.steps * self.batch : self.world_size]
        order = order.long() + (self.epoch * self.size if self.by_epoch else 0)
        for chunk in order.split(2**14):  # so many are Python numbers at a time
            yield from chunk.tolist()


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


def train_loader(dataset, args, device, collate=None):
    """A DataLoader of this rank's micro-batches. Raises `UserError` like `ResumableSampler`."""
    inside = [dataset]
    for one in inside:  # what wrappers such as Subset and ConcatDataset hold, and those in them
        held = [getattr(one, "dataset", None), *getattr(one, "datasets", [])]
        inside += [dataset for dataset in held if dataset is not None]
    if any(isinstance(one, RandomBySample) for one in inside[1:]):
        raise UserError(f"RandomBySample lies inside a {type(dataset).__name__}: make it the outermost wrapper")
    if isinstance(dataset, RandomBySample):
        dataset.seed = args.seed
    sampler = ResumableSampler(dataset, args)
    return DataLoader(dataset, sampler.micro_batch, sampler=sampler, **loader_options(args, device, collate))


def test_loader(dataset, args, device, collate=None):
    """A DataLoader by which the ranks see each sample once, in as many batches on every rank.

    Collectives in forward, as FSDP has them, need all ranks in each batch: a rank for which no sample is left sees
    sample 0 for company. It does not count, and it can be told: no share of a rank's own begins below the rank.
    """
    indices, size = range(len(dataset)), args.batch_size // args.accum
    shares = [indices[start : start + size][ranks.rank() :: ranks.world_size()] for start in indices[::size]]
    shares = [share or range(1) for share in shares]
    return DataLoader(dataset, batch_sampler=shares, **loader_options(args, device, collate))


def loader_options(args, device, collate):
    return dict(
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
        with signals_held():
            return iter(loader)


def move(value, device):
    """Tensors, and what else has a `to`, in any nesting of dicts, tuples and lists, on a device."""
    non_blocking = torch.device(device).type != "cpu"  # to there it would be read before it has come
    if isinstance(value, torch.Tensor):  # the way through the nesting takes long
        return value.to(device, non_blocking=non_blocking)
    return tree_map(lambda item: item.to(device, non_blocking=non_blocking) if hasattr(item, "to") else item, value)

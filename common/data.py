"""The data: which samples a rank sees in which step, at any world size and from any step on."""

import math

from common import ranks
from common.errors import UserError
from common.loading import RandomBySample, inside, make_loader

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, Sampler


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
        self.by_epoch = args.workers > 0 or isinstance(dataset, RandomBySample)
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
        order = order[self.step * self.batch + self.rank : self.steps * self.batch : self.world_size].clone()
        first = self.epoch * self.size if self.by_epoch else 0
        for chunk in order.split(2**14):  # so many are Python numbers at a time
            yield from (chunk.long() + first).tolist()


def train_loader(dataset, args, device, collate=None):
    """A DataLoader of this rank's micro-batches. Raises `UserError` like `ResumableSampler`."""
    if any(isinstance(one, RandomBySample) for one in inside(dataset)[1:]):
        raise UserError(f"RandomBySample lies inside a {type(dataset).__name__}: make it the outermost wrapper")
    if isinstance(dataset, RandomBySample):
        dataset.seed = args.seed
    sampler = ResumableSampler(dataset, args)
    return make_loader(dataset, args, device, collate, batch_size=sampler.micro_batch, sampler=sampler)


def test_loader(dataset, args, device, collate=None):
    """A DataLoader by which the ranks see each sample once, in as many batches on every rank.

    Collectives in forward, as FSDP has them, need all ranks in each batch: a rank for which no sample is left sees
    sample 0 for company. It does not count, and it can be told: no share of a rank's own begins below the rank.
    """
    indices, size = range(len(dataset)), args.batch_size // args.accum
    shares = [indices[start : start + size][ranks.rank() :: ranks.world_size()] for start in indices[::size]]
    shares = [share or range(1) for share in shares]
    return make_loader(dataset, args, device, collate, batch_sampler=shares)


def move(value, device):
    """Tensors, and what else has a `to`, in any nesting of dicts, tuples and lists, on a device."""
    non_blocking = torch.device(device).type != "cpu"  # to there it would be read before it has come
    if isinstance(value, torch.Tensor):  # the way through the nesting takes long
        return value.to(device, non_blocking=non_blocking)
    return tree_map(lambda item: item.to(device, non_blocking=non_blocking) if hasattr(item, "to") else item, value)

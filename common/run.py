"""What the training loop iterates over: options, sampler, progress, metrics, exact evaluation."""

import argparse
import errno
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, Subset
from tqdm import tqdm

from common import faults, group, snapshot
from common.launch import RunError, Stopped, UserError, die_with_parent, launcher

tqdm.set_lock(threading.RLock())  # its own is a semaphore too, of which a killed process leaves a warning

# -------------------------------------------------------------------------------------------------- options


class Arguments(argparse.ArgumentParser):
    """The options that all scripts share, and the groups of options that a script asks for; it may add its own.

    `parse_args` raises `UserError` for what is wrong at any world size.
    """

    def __init__(self, description, *, ddp=False, nprocs=False, launched=False):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)
        add = self.add_argument
        add("--epochs", type=whole(1), default=20, metavar="N", help="default 20")
        add("--batch-size", type=whole(1), default=96, metavar="N", help="global: what one step sees; default 96")
        add("--lr", type=positive, default=0.2, help="learning rate; default 0.2")
        add("--seed", type=whole(0), default=0, metavar="N", help="of weights and order of samples; default 0")
        add("--shuffle", choices=["randperm", "keyed"], default="randperm", help="keyed: no memory, for huge data")
        add("--steps", type=whole(1), metavar="N", help="stop after N steps in all")
        add("--device", default="auto", help="cpu, cuda, …; auto: the accelerator that torch finds, else cpu")
        add("--precision", choices=["fp32", "fp64", "bf16", "fp16"], default="fp32", help="bf16, fp16: autocast")
        add("--accum", type=whole(1), default=1, metavar="K", help="micro-batches per step; the result stays the same")
        add("--clip", type=positive, metavar="NORM", help="clip the norm of the gradient")
        add("--compile", action="store_true", help="torch.compile the model")
        add("--workers", type=whole(0, 1024), default=0, metavar="N", help="DataLoader workers per process; default 0")
        add("--threads", type=whole(1, 1024), metavar="N", help="CPU threads per process; default: its share of cores")
        add("--snapshot", type=Path, metavar="PATH", help="save to PATH and, where it exists, go on from it")
        add("--save-every", type=whole(1), metavar="N", help="save every N steps too, not just after each epoch")
        add("--timeout", type=seconds, default=600, metavar="SECONDS", help="of waiting for others; default 600")
        add("--metrics", type=Path, metavar="PATH", help="append one JSON object a line")
        add("--tensorboard", type=Path, metavar="DIR", help="write scalars for TensorBoard")
        add("--log-every", type=whole(1), default=1, metavar="N", help="log every N steps to these; default 1")
        if ddp:
            add("--backend", default="auto", help="gloo, nccl, …; auto: the one that torch names for the device")
        if nprocs:
            add("--nprocs", type=whole(1, 1024), metavar="N", help="processes; default: a device each, 2 on a CPU")
        if launched:
            add("--init-method", type=init_method, default="env://", help="env://, tcp://HOST:PORT or file:///PATH")
            add("--local-rank", "--local_rank", type=whole(0), help=argparse.SUPPRESS)  # torch.distributed.launch

    def parse_args(self, *args):
        options = super().parse_args(*args)
        if options.save_every and not options.snapshot:
            raise UserError("--save-every needs --snapshot PATH: the file to save to")
        written = [path.absolute() for path in (options.metrics, options.tensorboard, options.snapshot) if path]
        if options.snapshot:
            written += [Path(f"{written[-1]}{suffix}") for suffix in (".prev", ".tmp")]
        if len(set(written)) < len(written):
            raise UserError("--metrics, --tensorboard and --snapshot, with its .prev and .tmp: give each its own path")
        options.device = group.resolve_device(options.device)
        if "backend" in options:
            options.backend = group.resolve_backend(options.backend, options.device)
        check_precision(options)
        compiler = (os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")).split()[0]
        if options.compile and options.device == "cpu" and sys.platform != "win32" and not shutil.which(compiler):
            raise UserError(f"--compile needs a C++ compiler, and there is no {compiler}: install it, or set CXX")
        if not launcher():  # else rank 0 looks, whose machine may be another one
            check_paths(options)
        return options

    def error(self, message):
        raise UserError(f"{message}; see `python {self.prog} --help`")


def check_precision(args):
    """Raise `UserError` where the device does not have it."""
    if args.precision == "fp64" and args.device == "mps":
        raise UserError("--precision fp64: mps has no float64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns, and goes on in fp32
        try:
            autocast(args)
        except (RuntimeError, Warning) as error:
            raise UserError(f"--precision {args.precision} on {args.device}: {faults.describe(error)}") from None


def check_paths(args):
    """Raise `UserError` where this process could not write to the paths it was given; writes nothing."""
    for name, path in (("--metrics", args.metrics), ("--snapshot", args.snapshot), ("--tensorboard", args.tensorboard)):
        if not path:
            continue
        try:
            if name == "--tensorboard":
                reason = errno.ENOTDIR if path.exists() and not path.is_dir() else 0
            elif path.is_dir():
                reason = errno.EISDIR
            elif not path.parent.is_dir():
                reason = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
            else:
                there = path if name == "--metrics" and path.exists() else path.parent
                reason = 0 if os.access(there, os.W_OK) else errno.EACCES
            if name == "--metrics" and path.is_file() and not reason:
                with path.open("rb") as file:
                    if file.read(1) not in (b"", b"{"):
                        raise UserError(f"--metrics {path}: there is a file of another kind, which is left as it is")
        except OSError as error:
            reason = error.errno
        if reason:
            raise UserError(f"{name} {path}: {os.strerror(reason)}")


def whole(low, high=2**32):
    def parse(text):
        # No more digits than can be: Python refuses to read thousands.
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low} and at most {high}")
        return int(text)

    return parse


def seconds(text):
    number = positive(text)
    if not 1 <= number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to 1e6")
    return number


def positive(text):
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, and at most 1e9")
    return number


def init_method(text):
    try:
        url = urlsplit(text)
        known = text == "env://" or (url.scheme == "tcp" and url.hostname and url.port) or text.startswith("file:///")
    except ValueError:  # a port that is no port
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of env://, tcp://HOST:PORT, file:///PATH")
    return text


def check_batch(args, world_size):
    """Raise `UserError` where the global batch cannot be shared out evenly."""
    share = world_size * args.accum
    if args.batch_size % share:
        below, above = args.batch_size // share * share, -(-args.batch_size // share) * share
        nearest = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"--batch-size {args.batch_size} does not divide into {world_size} processes × {args.accum} "
            f"micro-batches: the nearest that does is {nearest}"
        )


# -------------------------------------------------------------------------------------------------- sampler


class ResumableSampler(Sampler):
    """This rank's share of each epoch, from any step on, so that step k sees the same samples at any world size.

    The order is that of torch's `DistributedSampler(shuffle=True, drop_last=True)` with the same seed and epoch, or
    that of `keyed_permutation`. What does not fill a global batch at the end of an epoch is left out.
    Raises `UserError` where the `size` samples do not fill one global batch.
    """

    CHUNK = 2**14  # indices that are Python numbers at a time

    def __init__(self, size, args):
        if size < args.batch_size:
            raise UserError(f"--batch-size {args.batch_size} is more than the {size} samples of the train set")
        self.size, self.seed, self.batch, self.shuffle = size, args.seed, args.batch_size, args.shuffle
        self.rank, self.world_size = group.rank(), group.world_size()
        self.micro_batch = args.batch_size // (self.world_size * args.accum)  # samples per process at a time
        self.steps = size // args.batch_size  # per epoch
        self.set_epoch(0)

    def set_epoch(self, epoch, step=0):
        """Choose the epoch, and the step in it with which the next iteration begins."""
        self.epoch, self.step = epoch, step

    def __len__(self):
        return (self.steps - self.step) * self.batch // self.world_size

    def __iter__(self):
        first, end, stride = self.step * self.batch + self.rank, self.steps * self.batch, self.world_size
        random = torch.Generator().manual_seed(self.seed + self.epoch)
        if self.shuffle == "keyed":
            starts = range(first, end, self.CHUNK * stride)
            places = (torch.arange(start, min(start + self.CHUNK * stride, end), stride) for start in starts)
            keys = torch.randint(2**62, (6,), generator=random).tolist()
            chunks = (keyed_permutation(place, self.size, keys) for place in places)
        else:
            # The order is the same with 32 bits, in half of the memory, of which this rank keeps its share.
            dtype = torch.int32 if self.size < 2**31 else torch.int64
            order = torch.randperm(self.size, generator=random, dtype=dtype)
            chunks = order[first:end:stride].clone().split(self.CHUNK)
        return chain.from_iterable(chunk.tolist() for chunk in chunks)


def keyed_permutation(places, size, keys):
    """Which of `size` samples stand at these places of the order that the keys choose; both int64 [n].

    A Feistel network permutes the numbers of an even count of bits. What falls outside `size` is permuted on until it
    falls inside. (J. Black, P. Rogaway: Ciphers with arbitrary finite domains, 2002.)
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = 2**half - 1
    samples, outside = places.clone(), slice(None)
    while len(values := samples[outside]):
        left, right = values >> half, values & mask
        for key in keys:
            mixed = (right ^ key) * -0x61C8864680B583EB  # 2^64 over the golden ratio; overflows wrap around
            mixed = (mixed ^ (mixed >> 31)) * -0x61C8864680B583EB
            left, right = right, left ^ ((mixed >> 31) & mask)
        samples[outside] = left << half | right
        outside = (samples >= size).nonzero().flatten()
    return samples


def loader_options(args, device):
    """Keyword arguments of every DataLoader."""
    return dict(
        num_workers=args.workers,
        pin_memory=device.type != "cpu",
        persistent_workers=args.workers > 0,
        worker_init_fn=start_worker,
        timeout=args.timeout if args.workers else 0,
    )


def start_worker(_worker):
    die_with_parent()
    # Ctrl-C and schedulers signal all processes, but this one's rank needs its batches until all ranks stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def iterate(loader):
    """`iter(loader)`, which draws a seed for the workers, without a trace in the random state."""
    with torch.random.fork_rng(devices=[]):
        return iter(loader)


# --------------------------------------------------------------------------------------------------- stopping


class Stop:
    """SIGTERM or Ctrl-C, as this rank received it."""

    received = 0  # number of the signal
    received_at = 0.0

    @classmethod
    def listen(cls):
        signal.signal(signal.SIGTERM, cls._receive)
        signal.signal(signal.SIGINT, cls._receive)

    @classmethod
    def _receive(cls, number, frame):
        if not cls.received:
            cls.received, cls.received_at = number, time.monotonic()
        elif time.monotonic() - cls.received_at > 1:  # sooner it is the same one, which the launcher passes on
            os._exit(128 + number)


class EachSecond:
    """An exchange among the ranks after the same steps on all of them, about one a second."""

    def __init__(self, device):
        self.device, self.interval, self.left, self.start = device, 1, 1, time.monotonic()

    def most(self, numbers):
        """To be called after each step. `numbers` returns this rank's.

        Returns the greatest of each over the ranks after the steps at which they exchange them, else None.
        """
        self.left -= 1
        if self.left:
            return None
        if faults.watch:
            faults.watch.beat()
        now = time.monotonic()
        seconds, *most = group.most([now - self.start, *numbers()], self.device)
        # The same on all ranks. It doubles at most, so that one fast step does not put the next exchange far off.
        self.interval = self.left = max(1, min(2 * self.interval, int(self.interval / max(seconds, 1e-9))))
        self.start = now
        return most


# ------------------------------------------------------------------------------------------------------ run


def autocast(args):
    """The context in which forward and loss are computed."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.precision)
    return torch.autocast(args.device, dtype) if dtype else nullcontext()


def unwrap(model):
    """The user's own model inside DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model


class Run:
    """One training run: gives the loop its epochs, steps and micro-batches, and reports what came of them."""

    def __init__(self, args, model, optimizer, sampler, device):
        self.args, self.model, self.optimizer, self.sampler, self.device = args, model, optimizer, sampler, device
        self.epoch = self.step_in_epoch = self.step_count = self.samples = 0
        self.seconds = self.loss_sum = self.loss_share = 0.0
        self.loss = self.score = self.train_loader = self.test_loader = None
        self.doing, self.losses, self.bad_loss = "the start", [], (0, 0.0)
        self.broken = self.gradients_checked = False
        self.saved = None  # the step of the snapshot that is there
        faults.where = self._where
        self.scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")
        group.from_rank(0, lambda: check_paths(args))
        group.check_same("the size of the train set", sampler.size)
        # The weights came from the common seed; what is random from here on differs from rank to rank.
        snapshot.seed(args.seed)
        self.snapshots = self.warm_up = None
        if args.snapshot:
            self.snapshots = snapshot.Snapshots(args, model, optimizer, self.scaler, sampler.size)
            self._resume(self.snapshots.resume())
            Stop.listen()
        self.in_training, self.in_evaluation = EachSecond(device), EachSecond(device)
        self.log = Log(args)
        group.from_rank(0, self.log.open)  # last, since it writes

    def _resume(self, position):
        if not position:
            return
        self.saved = position["step_count"]
        self.epoch, self.step_in_epoch = position["epoch"], position["step"]
        self.step_count, self.loss_sum = position["step_count"], position["loss_sum"]
        self.warm_up = isinstance(self.model, nn.parallel.DistributedDataParallel) and group.world_size() > 2
        at = f"{self.args.snapshot} after {self._at()}"
        if self._left():
            group.say(f"goes on from {at}")
        else:
            group.say(f"nothing left to train in {at}: to go on, raise --epochs{' or --steps' * bool(self.args.steps)}")

    def _at(self):
        return f"step {self.step_in_epoch}/{self.sampler.steps} of epoch {self.epoch + 1}, {self.step_count} in all"

    def _where(self):
        if self.doing != "training":
            return self.doing
        steps = self.sampler.steps
        return f"step {min(self.step_in_epoch + 1, steps)}/{steps} of epoch {self.epoch + 1}"

    def _left(self):
        """How many steps are left, in this epoch and the ones after it."""
        left = (self.args.epochs - self.epoch) * self.sampler.steps - self.step_in_epoch
        if self.args.steps:
            left = min(left, self.args.steps - self.step_count)
        return max(0, left)

    def epochs(self):
        """Iterate over the epochs; after the last, compare the ranks' weights and report.

        Raises `RunError` where the loop over an epoch's steps was left before its end.
        """
        # An epoch whose steps were all taken is entered again, for its evaluation alone.
        self.sampler.set_epoch(self.epoch, self.step_in_epoch)
        yield self.epoch
        while self._refuse_break() or (self._left() and self.epoch + 1 < self.args.epochs):
            self.epoch, self.step_in_epoch, self.loss_sum = self.epoch + 1, 0, 0.0
            self.sampler.set_epoch(self.epoch)
            yield self.epoch
        self._finish()

    def steps(self, loader):
        """Iterate over the epoch's optimizer steps; each is an iterator over its micro-batches.

        Raises `RunError` on all ranks, at the same step and about a second later at most, where a loss is not finite.
        """
        self.doing, self.before = "training", self.step_count - self.step_in_epoch
        batches = (self.sampler.steps - self.sampler.step) * self.args.accum
        if loader is not self.train_loader:
            self.train_loader = loader
            lengths = group.gather([len(loader)], self.device).flatten().long().tolist()
            if any(length != batches for length in lengths):
                # With gloo a rank that goes on alone could add a metric of the others to its gradient.
                raise UserError(
                    f"the ranks' loaders have {lengths} batches, not {batches} each: build them on the sampler"
                )
        steps = min(batches // self.args.accum, self._left())
        title = f"epoch {self.epoch + 1}/{self.args.epochs}"
        start = time.perf_counter()
        # disable=None: no bar where stderr is no terminal
        with tqdm(total=steps, desc=title, leave=False, disable=None if group.rank() == 0 else True) as bar:
            batches = iterate(loader) if steps else None
            if self.warm_up and steps:
                batches = self._warm_up(batches)
            self.broken, accumulates = True, self.args.accum > 1
            for _ in range(steps):
                self.step_loss = None
                yield self._micro_batches(batches) if accumulates else iter((next(batches),))
                self.step_in_epoch += 1
                bar.update()
                self._after_step()
            self.broken = False
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - start
        self.samples += steps * self.args.batch_size
        if self.snapshots:
            self._save()
        self._sum_losses()
        self.loss = self.loss_sum / self.step_in_epoch

    def _warm_up(self, batches):
        """Go forward and backward with the first batch, leaving no trace, and return all batches again.

        After its first backward DDP arranges the gradients anew, in the order in which they became ready. From then on
        three ranks and more add them up in another order, so that without this a run that goes on would differ in the
        last digits. It costs one step of a run; find_unused_parameters=True avoids the rearrangement, but costs time in
        every step.
        """
        self.warm_up = False
        first = next(batches)
        device = next(self.model.parameters()).device
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        states = snapshot.random_states(self.model)
        with autocast(self.args):
            outputs = self.model(first[0].to(device, non_blocking=True))
        sum(output.sum() for output in snapshot.tensors(outputs) if output.requires_grad).backward()
        self._check_gradients()
        self.optimizer.zero_grad()
        for buffer, value in buffers:
            buffer.copy_(value)
        snapshot.set_random_states(states, self.model)
        return chain([first], batches)

    def _look_at_losses(self):
        """Add this rank's new losses to its share. Returns whether one is not finite, as `bad_loss` then has it."""
        losses = torch.stack([torch.as_tensor(loss) for loss in self.losses]).tolist() if self.losses else []
        bad = [(self.step_count - len(losses) + number, loss) for number, loss in enumerate(losses, 1)]
        bad = [(step, loss) for step, loss in bad if not math.isfinite(loss)]
        for loss in losses:  # one by one: the sum shall not depend on when this is called
            self.loss_share += loss
        self.losses.clear()
        if bad:
            self.bad_loss = bad[0]
        return bool(bad)

    def _refuse_bad_losses(self):
        """Raise `RunError`, since `_look_at_losses` of some rank has found one."""
        if self.snapshots:
            self.snapshots.finish()  # which is of a step before
        found = group.gather(self.bad_loss, self.device)
        step = found[:, 0][found[:, 0] > 0].min()
        ranks = (found[:, 0] == step).nonzero().flatten().tolist()
        names = faults.watch.names(ranks) if faults.watch else "this process"
        rate = self.optimizer.param_groups[0]["lr"]
        saved = f"; {self.args.snapshot} is of a step before" if self.saved is not None else ""
        raise RunError(
            f"the loss of {names} is {found[ranks[0], 1]} in step {step - self.before:.0f}/{self.sampler.steps} of "
            f"epoch {self.epoch + 1}, {step:.0f} in all, at learning rate {rate:g}: lower --lr, or try --clip 1{saved}"
        )

    def _sum_losses(self):
        """Add the losses since the last call, which are each rank's own, to the epoch's sum of mean losses."""
        bad = self._look_at_losses()
        bad, loss = group.total(torch.tensor([bad, self.loss_share], dtype=torch.float64, device=self.device)).tolist()
        if bad:
            self._refuse_bad_losses()
        self.loss_sum += loss / group.world_size()
        self.loss_share = 0.0

    def _after_step(self):
        if found := self.in_training.most(lambda: [Stop.received, self._look_at_losses(), self._save_failed()]):
            stop, bad, failed = found
            if bad:
                self._refuse_bad_losses()
            if failed:
                self.snapshots.finish()
            if stop:
                self._stop(int(stop))
        if self.args.save_every and self.step_count % self.args.save_every == 0:
            self._save()

    def _save(self):
        if self.saved != self.step_count:
            self._sum_losses()
            position = {"epoch": self.epoch, "step": self.step_in_epoch, "step_count": self.step_count}
            self.snapshots.save(position | {"loss_sum": self.loss_sum})
            self.saved = self.step_count

    def _save_failed(self):
        return self.snapshots is not None and self.snapshots.failed()

    def _stop(self, number):
        self._save()
        self.snapshots.finish()
        name = signal.Signals(number).name
        group.say(f"stopped by {name} after {self._at()}: the same command goes on from {self.args.snapshot}")
        group.cleanup()
        raise Stopped(number)

    def _refuse_break(self):
        if self.broken:
            raise RunError(
                f"rank {group.rank()} left the loop over the steps in {self._where()}: let it come to its end on all "
                "ranks; to train less, use --steps, or leave the loop over the epochs on all of them"
            )

    def _check_gradients(self):
        """Tell which parameters no gradient reaches. Raises `UserError` where DDP would wait for it."""
        self.gradients_checked = True
        names = [
            name for name, value in unwrap(self.model).named_parameters() if value.requires_grad and value.grad is None
        ]
        if not names:
            return
        line = f"no gradient reaches {', '.join(names[:8])}" + f" and {len(names) - 8} more" * (len(names) > 8)
        ddp = isinstance(self.model, nn.parallel.DistributedDataParallel)
        if ddp and not (self.model.find_unused_parameters or self.model.static_graph):
            raise UserError(
                f"{line}: use them in forward, set requires_grad=False, or give DDP find_unused_parameters=True"
            )
        group.say(line)

    def _micro_batches(self, loader):
        for _ in range(self.args.accum - 1):
            # DDP adds the gradients up locally and communicates on the last micro-batch alone.
            with getattr(self.model, "no_sync", nullcontext)():
                yield next(loader)
        yield next(loader)

    def backward(self, loss):
        """`loss.backward()`, with the loss shared among the micro-batches and scaled for fp16."""
        if self.args.accum > 1:
            loss = loss / self.args.accum
        self.scaler.scale(loss).backward()
        loss = loss.detach()
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss

    def step(self):
        """`optimizer.step()`, after unscaling and clipping the gradient; logs the step's loss."""
        if not self.gradients_checked:
            self._check_gradients()
        self.scaler.unscale_(self.optimizer)
        if self.args.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step_count += 1
        self.losses.append(0.0 if self.step_loss is None else self.step_loss)
        if self.log.wanted and self.step_count % self.args.log_every == 0:
            loss = group.total(self.step_loss.double()).item() / group.world_size()
            if not math.isfinite(loss):
                self._sum_losses()  # tells which
            self.log.write("step", epoch=self.epoch + 1, step=self.step_count, loss=loss)

    @torch.no_grad()
    def evaluate(self, test_set, score):
        """Count with `score` how many samples are right, each sample once at any world size, and print the epoch."""
        self._refuse_break()
        self.doing = f"the evaluation after epoch {self.epoch + 1}"
        rank, world_size, model = group.rank(), group.world_size(), unwrap(self.model)
        if self.test_loader is None:
            group.check_same("the size of the test set", len(test_set))
            share = Subset(test_set, range(rank, len(test_set), world_size))
            self.test_loader = DataLoader(share, self.args.batch_size, **loader_options(self.args, self.device))
        group.share_buffers(model)
        model.eval()
        device, correct, total = next(model.parameters()).device, 0, 0
        everywhere = len(test_set) // world_size // self.args.batch_size  # batches that each rank has
        for batch, (inputs, labels) in enumerate(iterate(self.test_loader)):
            with autocast(self.args):
                outputs = model(inputs.to(device, non_blocking=True))
            correct += score(outputs, labels.to(outputs.device, non_blocking=True))
            total += len(labels)
            found = self.in_evaluation.most(lambda: [Stop.received]) if batch < everywhere else None
            if found and found[0]:
                self._stop(int(found[0]))
        model.train()
        correct, total = group.total(torch.tensor([int(correct), total], device=self.device)).tolist()
        self.score = {"accuracy": correct / total, "correct": correct, "total": total}
        group.say(f"epoch {self.epoch + 1}/{self.args.epochs}: loss {self.loss:.4f}, {self._accuracy()}")
        self.log.write("eval", epoch=self.epoch + 1, step=self.step_count, **self.score)
        self.doing = f"the end of epoch {self.epoch + 1}"

    def _accuracy(self):
        score = self.score
        return f"test accuracy {score['accuracy']:.2%} ({score['correct']}/{score['total']})"

    def _finish(self):
        self.doing, model = "the end", unwrap(self.model)
        if self.snapshots:
            self.snapshots.finish()
        group.check_same_weights(model, self.device)
        memory = group.gather(peak_memory(self.model), self.device).flatten().tolist()
        peaks = ", ".join(f"{mib:.0f}" for mib in memory)
        if len(memory) > 8:
            peaks = f"{min(memory):.0f} to {max(memory):.0f}"
        speed = self.samples / self.seconds if self.samples else 0.0
        accuracy = f"{self._accuracy()}, " if self.score else ""
        group.say(
            f"done: {self.epoch + 1} epochs, {self.step_count} steps, loss {self.loss:.4f}, {accuracy}"
            f"{speed:.0f} samples/s, peak memory per device {peaks} MiB"
        )
        self.log.write(
            "end",
            step=self.step_count,
            loss=self.loss,
            accuracy=self.score and self.score["accuracy"],
            samples_per_s=speed,
            world_size=group.world_size(),
            weights_sha256=weights_sha256(model),
        )


def weights_sha256(model):
    """Digest of the parameters' bytes in the order of `state_dict`."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def peak_memory(model):
    """Peak memory in MiB of each device that this process trains on."""
    devices = snapshot.devices(model)
    if devices[0].type != "cpu":
        module = torch.get_device_module(devices[0])
        return [module.max_memory_allocated(device) / 2**20 for device in devices]
    if sys.platform == "linux":
        # Not getrusage: what it tells begins with the peak of the process that started this one.
        status = Path("/proc/self/status").read_text()
        return [int(status.partition("VmHWM:")[2].split()[0]) / 2**10]
    if sys.platform == "darwin":
        import resource  # not on Windows

        return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]
    return [math.nan]


class Log:
    """Metrics for programs (one JSON object a line) and for TensorBoard, written by rank 0 alone."""

    def __init__(self, args):
        self.args, self.wanted = args, bool(args.metrics or args.tensorboard)
        self.lines = self.board = None

    def open(self):
        """Raises `UserError` where it cannot write."""
        if self.args.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("--tensorboard needs the package: pip install tensorboard") from None
            try:
                self.board = SummaryWriter(self.args.tensorboard)
            except (OSError, UnicodeError) as error:
                raise UserError(f"--tensorboard {self.args.tensorboard}: {faults.describe(error)}") from None
        if self.args.metrics:
            try:
                self.lines = self.args.metrics.open("a", buffering=1, encoding="utf-8")
            except OSError as error:
                raise UserError(f"--metrics {self.args.metrics}: {error.strerror}") from None

    def write(self, event, **values):
        if self.lines:
            try:
                self.lines.write(json.dumps({"event": event, **values}) + "\n")
            except OSError as error:
                raise RunError(f"--metrics {self.args.metrics}: {error.strerror}") from None
        if self.board:
            for name in {"step": ["loss"], "eval": ["accuracy"], "end": []}[event]:
                self.board.add_scalar(name, values[name], values["step"])
            self.board.flush()

"""What the training loop iterates over: epochs, micro-batches, evaluation, snapshots, what is reported."""

import math
import signal
import sys
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

from common import job, ranks, snapshot, states
from common.data import ResumableSampler, check_sets, move, test_loader
from common.errors import RunError, UserError, process
from common.loading import iterate
from common.log import Log, weights_sha256
from common.loop import Loop

import torch
from torch.utils._pytree import tree_leaves

# Where a run is, as a snapshot has it. step: in the epoch; loss_sum: of the epoch's steps, this rank's, in a snapshot
# the mean over the ranks; lr: the last learning rate; ended: the epoch, by a break; finished: the run, True or "break".
POSITION = {"epoch": 0, "step": 0, "step_count": 0, "loss_sum": 0.0, "lr": math.nan, "ended": False, "finished": False}


class Run(Loop):
    """One training run: gives the loop its epochs and micro-batches, saves what is named, and reports.

    loader: from `train_loader`. wrapped: what the loop calls in place of the model, such as DDP(model), or the model
    itself. model and named: whatever has `state_dict` and `load_state_dict`, and dicts and `torch.Generator`s, is saved
    and loaded under its name. Raises `UserError` for what has no state, and what `Snapshots` raises.
    """

    def __init__(self, args, loader, wrapped, *, model, **named):
        self.args, self.loader, self.wrapped, self.model = args, loader, wrapped, model
        self.named, self.sampler = {"model": model, **named}, loader.sampler
        states.check(self.named)
        if not isinstance(self.sampler, ResumableSampler) or len(loader) != self.sampler.steps * args.accum:
            raise UserError("Run: the loader is not train_loader's, by which each rank sees its samples: use that")
        self.device = torch.device(args.device)
        vars(self).update(POSITION)
        self.scores, self.words, self.test_loaders = {}, [], {}
        self.doing, process.where = "the start", lambda: self.doing or self._at(1)  # "" in the loop over micro-batches
        super().__init__(model, wrapped, named.values())
        # The weights came from the common seed; what is random from here on differs from rank to rank.
        states.seed(args.seed)
        self.signal, self.reported = [], False  # signal: that stops this run
        self.snapshots = SimpleNamespace(save=lambda _: None, saved=None, failed=lambda: False, finish=lambda: None)
        if args.snapshot:
            self.snapshots = snapshot.Snapshots(args, self.named, wrapped, self.sampler.size)
            if position := self.snapshots.resume():
                vars(self).update({name: position[name] for name in POSITION})
                hint = ": nothing left to train, but with more --epochs or --steps"
                hint = "" if self._left() or self._epochs_left() else hint
                ranks.say(f"goes on from {args.snapshot} after {self._at()}, {self.step_count} in all{hint}")
            self.signal = snapshot.listen()
        self.in_training, self.in_evaluation = ranks.EachSecond(self.device), ranks.EachSecond(self.device)
        self.output = Log(args)
        ranks.from_rank(0, self.output.open)  # last, since it writes

    def _at(self, more=0):
        return f"step {min(self.step + more, self.sampler.steps)}/{self.sampler.steps} of epoch {self.epoch + 1}"

    def _left(self):
        """How many steps are left in this epoch."""
        left = min(self.sampler.steps - self.step, self.sampler.total_steps - self.step_count)
        return 0 if self.ended else max(0, left)

    def _epochs_left(self):
        return self.epoch + 1 < self.args.epochs and self.step_count < self.sampler.total_steps

    def epochs(self):
        """Iterate over the numbers of the epochs, from 0; after the last, compare the ranks' weights and report."""
        if self.args.snapshot:
            states.check_all_named(self.named.values(), self.wrapped)
        process.at_end.append(self._after_break)
        while True:  # an epoch whose steps were all taken is entered again, for its evaluation alone
            if self.finished is not True or self._left() or not self._epochs_left():
                yield self.epoch
            self._settle()
            self.finished = False
            if not self._epochs_left():
                break
            self.epoch, self.step, self.loss_sum, self.ended = self.epoch + 1, 0, 0.0, False
        self._finish()

    def _save(self):
        self._sum_losses()  # of a step whose loss is not finite nothing is saved
        self.snapshots.save({name: getattr(self, name) for name in POSITION})

    def _news(self):
        self._read_losses()
        return [*self.signal, 0][0], not math.isfinite(self.loss_sum), self.snapshots.failed()

    def _exchange(self, each_second):
        """About once a second: stop, or fail, where a rank has a reason to: a signal, its losses, its snapshot."""
        if any(found := each_second.most(self._news)):
            self._save()  # raises where a loss is not finite
            self.snapshots.finish()  # raises where one could not be written
            name = signal.Signals(int(found[0])).name
            at = f"{self._at()}, {self.step_count} in all"
            ranks.say(f"stopped by {name} after {at}: the same command goes on from {self.args.snapshot}")
            self.reported = True
            process.end()
            sys.exit(128 + int(found[0]))

    @torch.no_grad()
    def evaluate(self, data, name="test", model=None):
        """Evaluate the model on a dataset, each sample once, with `job.score`; report the means over the samples.

        Returns {score: mean}, the same on all ranks. name: of the set or the model, where there are several. model:
        another than the run's, such as its average. Modules come back in the mode in which each was. Raises `UserError`
        where the set is empty, or the scores are no sums.
        """
        self._settle()
        model = self.model if model is None else model
        if not isinstance(name, str):
            raise UserError(f"run.evaluate: the name is a {type(name).__name__}: write run.evaluate(data, 'ema', ema)")
        doing, began, in_epoch = self.doing, time.perf_counter(), not self.doing
        self.doing = f"the evaluation after {self._at() if in_epoch else f'epoch {self.epoch + 1}'}"
        if name not in self.test_loaders or self.test_loaders[name][0] is not data:
            check_sets(data, names=[f"{name} set"])
            self.test_loaders[name] = data, test_loader(data, self.args, self.device, self.loader.collate_fn)
        ranks.share_buffers(model)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        loader, sums, mine = self.test_loaders[name][1], Counter(), defaultdict(list)
        device = next(model.parameters()).device
        for share, (inputs, labels) in zip(loader.batch_sampler, iterate(loader), strict=True):
            with torch.autocast(self.args.device, self.args.dtype, enabled=self.args.dtype is not None):
                outputs = model(move(inputs, device))
                there = [value.device for value in tree_leaves(outputs) if isinstance(value, torch.Tensor)]
                scores = job.score(outputs, move(labels, there[0] if there else device))
            if not isinstance(scores, dict) or any(torch.as_tensor(value).ndim for value in scores.values()):
                kind = type(scores).__name__
                raise UserError(f"job.score returned a {kind}: return {{name: sum over the samples, a scalar}}")
            for key, value in scores.items() if share[0] >= ranks.rank() else []:  # else for company
                mine[key].append(torch.as_tensor(value))
            if not in_epoch:
                self._exchange(self.in_evaluation)
        for module, mode in modes:
            module.training = mode
        # A rank may lack a score that only some samples have.
        for theirs in ranks.gather_objects({key: sum(torch.stack(some).tolist()) for key, some in mine.items()}):
            sums.update(theirs)
        self.scores = {key: value / len(data) for key, value in sums.items()}
        self.words = [f"{name} {key} {value:.4g}" for key, value in self.scores.items()]
        self.doing, step = doing, self.step_count + self.step_due  # that one is counted when the loop goes on
        self.seconds -= in_epoch * (time.perf_counter() - began)
        words = self.words if in_epoch else [*self._training(), *self.words]
        where = f"epoch {self.epoch + 1}/{self.args.epochs}" + f", step {step}" * in_epoch
        ranks.say(f"{where}: {', '.join(words)}")
        self.output.write("eval", self.scores, epoch=self.epoch + 1, step=step, set=name, total=len(data))
        return self.scores

    @property
    def loss(self):
        """The epoch's mean loss, as of when the ranks last added theirs up."""
        return self.loss_sum / self.step if self.step else math.nan

    def _training(self):
        return f"loss {self.loss:.4f}", f"lr {self.lr:.4g}"

    def log(self, **values):
        """Log what the user measures, numbers or scalar tensors of rank 0, every --log-every steps."""
        step = self.step_count + self.step_due
        if self.output.wanted and (self.doing or step % self.args.log_every == 0):
            self.output.write("log", values, epoch=self.epoch + 1, step=step)

    def _after_break(self):
        """Report after a `break` in the loop over the epochs, which all ranks must have made at the same place."""
        if not self.reported:
            self._settle()
            if process.watch and (line := process.watch.end_together("break")):
                raise RunError(line)
            self._finish("break")

    def _finish(self, finished=True):
        self.doing, self.finished, self.reported = "the end", finished, True
        self._save()  # what follows the last evaluation, such as the best weights, as well
        self.snapshots.finish()
        ranks.check_same_weights(self.model)
        speed = self.taken * self.args.batch_size / self.seconds if self.seconds else 0.0
        seconds = time.time() - self.args.began
        words = [f"done: {self.epoch + 1} epochs, {self.step_count} steps", *self._training(), *self.words]
        words.append(f"{speed:.0f} samples/s")
        if hasattr(device := torch.get_device_module(self.device), "max_memory_allocated"):
            peaks = [device.max_memory_allocated(one) / 2**20 for one in states.devices(self.wrapped)]
            peaks = [peak for some in ranks.gather_objects(peaks) for peak in some]
            words.append(f"peak memory per device {min(peaks):.0f} to {max(peaks):.0f} MiB")
        ranks.say(f"{', '.join(words)}, {seconds:.1f} s in all")
        end = {"step": self.step_count, "loss": self.loss, "seconds": seconds, "samples_per_s": speed}
        end |= {"world_size": ranks.world_size(), "weights_sha256": weights_sha256(self.model)}
        self.output.write("end", self.scores, **end)

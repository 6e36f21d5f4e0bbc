"""The loop over the micro-batches of an epoch: are its steps taken as they must be, and what are their losses?"""

import contextlib
import functools
import math
import threading
import time

from common import ranks
from common.agree import check_gradients
from common.data import iterate
from common.errors import RunError, UserError, process

import torch
from torch.optim import Optimizer
from tqdm import tqdm

tqdm.set_lock(threading.RLock())  # its own is a semaphore too, of which a killed process leaves a warning


class Loop:
    """The half of `Run` that works in each step. The other half knows where it is, saves, evaluates and reports."""

    def __init__(self, model, wrapped, named):
        self.scalers = [one for one in named if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]
        self.optimizers = [one for one in named if isinstance(one, Optimizer)]
        self.stepped = stepped = []  # an item for each time that an optimizer stepped in this step
        check = functools.cache(lambda: check_gradients(model, wrapped))  # in the first step alone
        for optimizer in self.optimizers:  # the hook does not refer to the run: it, and loader workers, end in order
            optimizer.register_step_post_hook(lambda *_: (check(), stepped.append(1)))
        self.step_due, self.broken, self.samples, self.seconds = False, False, 0, 0.0  # since the start of this process
        self.scales, self.losses, self.rates = [], [], []  # losses, rates: of the micro-batches and steps that are new
        self.share, self.bad, self.loss = 0.0, None, math.nan  # see `_look_at_losses`; the epoch's mean

    def batches(self):
        """Iterate over the micro-batches that are left of the epoch. `step_due` is true with the last of each step.

        Give each loss to `record`, and take an optimizer step where one is due. A `break` that all ranks make at the
        same step ends the epoch early. Raises `UserError` on a rank that does not record or step, `RunError` on all
        ranks, about a second later at most, where a loss is not finite.
        """
        self._settle()
        self.sampler.set_epoch(self.epoch, self.step)
        steps, accum, title = self._left(), self.args.accum, f"epoch {self.epoch + 1}/{self.args.epochs}"
        # The ranks add their gradients up, and communicate with the last micro-batch of a step alone.
        local = getattr(self.wrapped, "no_sync", contextlib.nullcontext)
        communicate = getattr(self.wrapped, "set_requires_gradient_sync", None) if accum > 1 else None  # FSDP2's
        self.doing, self.seconds = "", self.seconds - time.perf_counter()
        # disable=None: no bar where stderr is no terminal
        with tqdm(total=steps, desc=title, leave=False, disable=None if ranks.rank() == 0 else True) as self.bar:
            batches = iterate(self.loader) if steps else None
            try:
                for number in range(steps * accum):
                    seen = number % accum + 1
                    self.step_due = seen == accum
                    if communicate:
                        communicate(self.step_due)
                    if self.step_due:
                        # What the scale is now, without waiting for it: a step that fp16 skips changes it.
                        self.scales = [one.scale(torch.ones((), device=self.device)) for one in self.scalers]
                        self.lr = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else math.nan
                    with contextlib.nullcontext() if self.step_due else local():
                        yield next(batches)
                    if mistake := self._mistake(seen):
                        raise UserError(f"rank {ranks.rank()} in {process.where()}: {mistake}")
                    if self.step_due:
                        self._count()
                        self._exchange(self.in_training)
                        if self.args.save_every and self.step_count % self.args.save_every == 0:
                            self._save()
            except GeneratorExit:
                self.broken = True
                raise
        self._close()

    def record(self, loss):
        """Count a micro-batch with its loss, a scalar: the mean over it. It is read about once a second."""
        loss = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss)
        if loss.ndim:
            raise UserError(f"run.record: the loss has the shape {list(loss.shape)}, but must be a scalar, the mean")
        self.losses.append(loss)

    def _mistake(self, seen):
        """What the loop did wrong in a step of which it has had so many micro-batches, in words; or ""."""
        if (recorded := len(self.losses) - self.args.accum * len(self.rates)) != seen:
            return f"run.record(loss) was called {recorded} times for {seen} micro-batches: call it once for each"
        if bool(self.stepped) == self.step_due or not self.optimizers:
            return ""
        skipped = (one.get_scale() != scale for one, scale in zip(self.scalers, self.scales, strict=True))
        if self.step_due and any(skipped):
            return ""
        return (
            f"{'no' if self.step_due else 'an'} optimizer stepped after {seen} of {self.args.accum} micro-batches: "
            "where run.step_due is true, and only there, call scaler.step(optimizer), or optimizer.step(), of one that "
            "Run names"
        )

    def _count(self):
        """Count a step that was taken."""
        self.step += 1
        self.step_count += 1
        self.samples += self.args.batch_size
        self.rates.append(self.lr)
        self._forget()
        self.bar.update()
        if self.output.wanted and self.step_count % self.args.log_every == 0:
            first, *others = self.losses[-self.args.accum :]
            loss = ranks.total(sum(others, first).double()).item() / self.args.accum / ranks.world_size()
            if not math.isfinite(loss):
                self._sum_losses()  # tells which
            self.output.write("step", {"loss": loss, "lr": self.lr}, epoch=self.epoch + 1, step=self.step_count)

    def _forget(self):
        """Forget what was seen of a step that is not counted."""
        del self.losses[self.args.accum * len(self.rates) :]
        self.stepped.clear()
        self.step_due = False

    def _look_at_losses(self):
        """Add this rank's new losses to its share of the sum. Of the first that is not finite, `bad` keeps the step."""
        means = torch.stack(self.losses).view(-1, self.args.accum).mean(1).tolist() if self.losses else []
        for step, (loss, rate) in enumerate(zip(means, self.rates, strict=True), self.step_count - len(means) + 1):
            self.share += loss  # one by one: the sum shall not depend on when this is called
            if not math.isfinite(loss) and not self.bad:
                self.bad = step, loss, rate
        if means:
            self.bar.set_postfix(loss=f"{means[-1]:.4g}", refresh=False)
        self.losses, self.rates = [], []

    def _sum_losses(self):
        """Add the ranks' losses since the last call to the epoch's sum. Raises `RunError` where one is not finite."""
        self._look_at_losses()
        share = ranks.total(torch.tensor(self.share, dtype=torch.float64, device=self.device)).item()
        self.loss_sum, self.share = self.loss_sum + share / ranks.world_size(), 0.0
        self.loss = self.loss_sum / self.step if self.step else math.nan
        if math.isfinite(share):
            return
        self.snapshots.finish()  # which is of a step before
        found = ranks.gather_objects(self.bad)
        step, loss, rate = min(filter(None, found))
        where = [rank for rank, bad in enumerate(found) if bad and bad[0] == step]
        names = process.watch.names(where) if process.watch else "this process"
        raise RunError(
            f"the loss of {names} is {loss} in {self._at(step - self.step_count)}, {step} in all, at learning rate "
            f"{rate:g}: lower --lr, or try --clip 1"
            + (f"; {self.args.snapshot} is of a step before" if self.saved else "")
        )

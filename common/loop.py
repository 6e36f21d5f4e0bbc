"""The loop over the micro-batches of an epoch: are its steps taken as they must be, and what are their losses?"""

import contextlib
import functools
import math
import threading
import time

from common import ranks
from common.errors import RunError, UserError, process
from common.loading import iterate

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from tqdm import tqdm

tqdm.set_lock(threading.RLock())  # its own is a semaphore too, of which a killed process leaves a warning


class Loop:
    """The half of `Run` that works in each step. The other half knows where it is, saves, evaluates and reports."""

    def __init__(self, model, wrapped, named):
        self.optimizers = [one for one in named if isinstance(one, Optimizer)]
        # Of the step that is under way: its losses, an item for each time that an optimizer stepped, and the scales.
        self.recorded, self.stepped = [], (stepped := [])
        self.scales = {one: None for one in named if isinstance(one, torch.amp.GradScaler) and one.is_enabled()}
        check = functools.cache(lambda: check_gradients(model, wrapped))  # in the first step alone
        for optimizer in self.optimizers:  # the hook does not refer to the run: it, and loader workers, end in order
            optimizer.register_step_post_hook(lambda *_: (check(), stepped.append(1)))
        self.step_due, self.broken, self.taken, self.seconds = False, False, 0, 0.0  # since the start of this process
        self.losses, self.finite = [], 0  # of the steps that are new; how many were taken until a loss was not finite
        if ranks.world_size() > 2:
            arrange_gradients(wrapped)

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
        with tqdm(range(steps), title, leave=False, disable=None if ranks.rank() == 0 else True) as self.bar:
            batches = iterate(self.loader) if steps else None
            try:
                for _ in self.bar:
                    self.recorded.clear()
                    self.stepped.clear()
                    for seen in range(1, accum + 1):
                        self.step_due = seen == accum
                        if communicate:
                            communicate(self.step_due)
                        if self.step_due:
                            self._before_step()
                        with contextlib.nullcontext() if self.step_due else local():
                            yield next(batches)
                        if mistake := self._mistake(seen):
                            raise UserError(f"rank {ranks.rank()} in {process.where()}: {mistake}")
                    self._count_step()
                    self._exchange(self.in_training)
                    if self.args.save_every and self.step_count % self.args.save_every == 0:
                        self._save()
            except GeneratorExit:  # by a break; what were raised here would be lost
                self.broken = True
                raise
        self._close()

    def record(self, loss):
        """Count a micro-batch with its loss, a scalar: the mean over it. It is read about once a second."""
        loss = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss)
        if loss.ndim:
            raise UserError(f"run.record: the loss has the shape {list(loss.shape)}, but must be a scalar, the mean")
        self.recorded.append(loss)

    def _before_step(self):
        for one in self.scales:  # what the scale is now, without waiting for it: a step that fp16 skips changes it
            self.scales[one] = one.scale(torch.ones((), device=self.device))
        self.lr = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else math.nan

    def _mistake(self, seen):
        """What the loop did wrong in a step of which it has had so many micro-batches, in words; or ""."""
        if (recorded := len(self.recorded)) != seen:
            return f"run.record(loss) was called {recorded} times for {seen} micro-batches: call it once for each"
        if bool(self.stepped) == self.step_due or not self.optimizers:
            return ""
        if self.step_due and any(one.get_scale() != scale for one, scale in self.scales.items()):
            return ""
        return (
            f"{'no' if self.step_due else 'an'} optimizer stepped after {seen} of {self.args.accum} micro-batches: "
            "where run.step_due is true, and only there, call scaler.step(optimizer), or optimizer.step(), of one that "
            "Run names"
        )

    def _count_step(self):
        self.step, self.step_count, self.step_due = self.step + 1, self.step_count + 1, False
        self.taken += 1
        self.losses += self.recorded
        if self.output.wanted and self.step_count % self.args.log_every == 0:
            loss = ranks.total(torch.stack(self.recorded).double().mean()).item() / ranks.world_size()
            if not math.isfinite(loss):
                self._sum_losses()  # tells which
            self.output.write("step", {"loss": loss, "lr": self.lr}, epoch=self.epoch + 1, step=self.step_count)

    def _settle(self):
        """Come to terms with a `break` in the loop over the micro-batches: all ranks must have made it."""
        if not self.broken:
            return
        self.broken, taken = False, self.step_due and not self._mistake(self.args.accum)
        if process.watch and not process.watch.all_leave(f"step {self.step_count + taken}"):
            raise RunError(
                f"rank {ranks.rank()} left the loop over the batches in {process.where()}, and others did not: break "
                "on all ranks at the same step, for example by what run.evaluate returns, which is the same on all"
            )
        if taken:
            self._count_step()
        self.wrapped.zero_grad()  # of micro-batches without a step
        self.ended, self.step_due = True, False
        self._close()

    def _close(self):
        """Close the loop over the micro-batches of an epoch."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter()
        self._save()
        self.doing = f"the end of epoch {self.epoch + 1}"

    def _read_losses(self):
        """Add this rank's new losses to the epoch's sum."""
        means = torch.stack(self.losses).view(-1, self.args.accum).mean(1).tolist() if self.losses else []
        for loss in means:  # one by one: the sum shall not depend on when this is called
            self.loss_sum += loss
            self.finite += math.isfinite(self.loss_sum)
        if means:
            self.bar.set_postfix(loss=f"{means[-1]:.4g}", refresh=False)
        self.losses.clear()

    def _sum_losses(self):
        """Make the epoch's sum of losses the mean over the ranks. Raises `RunError` where a loss is not finite."""
        self._read_losses()
        loss_sum = torch.tensor(self.loss_sum, dtype=torch.float64, device=self.device)
        self.loss_sum = ranks.total(loss_sum).item() / ranks.world_size()
        if math.isfinite(self.loss_sum):
            return
        self.snapshots.finish()  # which is of a step before
        found = ranks.gather_objects(self.finite)
        first, last = min(found) + 1 - self.taken, self.step_count  # first: counted from the last step on
        names = [rank for rank, finite in enumerate(found) if finite == min(found)]
        names = process.watch.names(names) if process.watch else "this process"
        raise RunError(
            f"the loss of {names} is {self.loss_sum} in {self._at(first)}, {last + first} in all; the learning rate is "
            f"now {self.lr:g}: lower --lr, or try --clip 1"
            + (f"; {self.args.snapshot} is of a step before" if self.snapshots.saved else "")
        )


def check_gradients(model, wrapped):
    """Tell which parameters no gradient reaches. Raises `UserError` where DDP would wait for it."""
    names = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
    line = f"no gradient reaches {ranks.few(names)}"
    if names and isinstance(wrapped, DDP) and not (wrapped.find_unused_parameters or wrapped.static_graph):
        raise UserError(
            f"{line}: use them in forward, set requires_grad=False, or give DDP find_unused_parameters=True"
        )
    if names:
        ranks.say(line)


def arrange_gradients(model):
    """Let DDP arrange the gradients now, the last parameter's first, and not after its first backward pass.

    From that on three ranks and more add them up in another order, so that a run that goes on after a resume, whose
    first backward is a later one, would differ in the last digits. With `find_unused_parameters=True` DDP keeps its
    first order. With `static_graph=True` it allows no backward but the model's own: such a run differs.
    """
    some = [one for one in model.modules() if isinstance(one, DDP)]
    for ddp in [one for one in some if not (one.find_unused_parameters or one.static_graph)]:
        ddp.reducer.prepare_for_backward([])  # as its forward pass does; torch has no public name for it
        sparse = {id(one.weight) for one in ddp.modules() if getattr(one, "sparse", False)}
        parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        for one in reversed(parameters):
            one.backward(torch.zeros_like(one, layout=torch.sparse_coo if id(one) in sparse else torch.strided))
        for one in parameters:
            one.grad = None

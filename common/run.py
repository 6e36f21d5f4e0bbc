"""What the training loop iterates over: epochs, micro-batches, exact evaluation, agreement, metrics."""

import contextlib
import gc
import hashlib
import json
import math
import os
import signal
import threading
import time
import weakref

from common import job, ranks, snapshot, states
from common.data import ResumableSampler, check_set, iterate, move, test_loader
from common.errors import RunError, Stopped, UserError, describe, process, stop_signals
from common.waiting import few

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

tqdm.set_lock(threading.RLock())  # its own is a semaphore too, of which a killed process leaves a warning

# --------------------------------------------------------------------------------------------------- stopping


class Stop:
    """SIGTERM, Ctrl-C or a closed terminal, as this rank received it."""

    def __init__(self):
        self.received, self.received_at = 0, 0.0  # number of the signal
        for number in stop_signals():
            signal.signal(number, self.receive)

    def receive(self, number, frame):
        if not self.received:
            self.received, self.received_at = number, time.monotonic()
        elif time.monotonic() - self.received_at > 1:  # sooner it is the same one, which the launcher passes on
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
        now = time.monotonic()
        seconds, *most = ranks.most([now - self.start, *numbers()], self.device)
        # The same on all ranks. It doubles at most, so that one fast step does not put the next exchange far off.
        self.interval = self.left = max(1, min(2 * self.interval, int(self.interval / max(seconds, 1e-9))))
        self.start = now
        return most


# ------------------------------------------------------------------------------------------------------ run


class Run:
    """One training run: gives the loop its epochs and micro-batches, saves what is named, and reports.

    loader: from `train_loader`. wrapped: what the loop calls in place of the model, such as DDP(model), or the model
    itself. model and named: whatever has `state_dict` and `load_state_dict`, and dicts and `torch.Generator`s, is saved
    and loaded under its name. Raises `UserError` for what has no state, and what `Snapshots` raises.
    """

    def __init__(self, args, loader, wrapped, *, model, **named):
        self.args, self.loader, self.wrapped, self.model = args, loader, wrapped, model
        self.named, self.sampler = {"model": model, **named}, loader.sampler
        for name, one in self.named.items():
            if name == "run" or not states.has_state(one):
                raise UserError(
                    f"Run(…, {name}=…) is a {type(one).__name__}: what is named needs state_dict and load_state_dict, "
                    "or is a dict or a torch.Generator; and no name is run"
                )
        if not isinstance(self.sampler, ResumableSampler) or len(loader) != self.sampler.steps * args.accum:
            raise UserError(
                "Run: the loader is not train_loader's, so that the ranks would see other samples: use that"
            )
        index = None if args.device == "cpu" else torch.accelerator.current_device_index()
        self.device = torch.device(args.device, index)
        self.optimizers = [one for one in self.named.values() if isinstance(one, Optimizer)]
        self.scalers = [one for one in named.values() if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]
        count = weakref.WeakMethod(self._count_step)  # no cycle: loader workers end in order as soon as this is let go
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(lambda *args: count()(*args))
        self.epoch = self.step = self.step_count = self.samples = self.stepped = self.recorded = 0  # step: in the epoch
        self.seconds = self.loss_sum = self.loss_share = self.began = 0.0
        self.loss = self.lr = self.step_loss = self.saved = self.scales = None  # saved: where the newest snapshot is
        self.losses, self.rates, self.scores, self.test_loaders, self.bad_loss = [], [], {}, {}, (0, 0.0, 0.0)
        self.step_due = self.in_batches = self.broken = self.ended = self.finished = False
        self.gradients_checked = self.names_checked = False
        self.doing, process.where = "the start", self._where
        # The weights came from the common seed; what is random from here on differs from rank to rank.
        states.seed(args.seed)
        self.snapshots = self.stop = None
        if args.snapshot:
            self.snapshots = snapshot.Snapshots(args, self.named, wrapped, self.sampler.size)
            self._resume(self.snapshots.resume())
            self.stop = Stop()
        if ranks.world_size() > 2:
            arrange_gradients(wrapped)
        self.in_training, self.in_evaluation = EachSecond(self.device), EachSecond(self.device)
        self.output = Log(args)
        ranks.from_rank(0, self.output.open)  # last, since it writes

    def _resume(self, position):
        if not position:
            return
        self.finished = position.get("finished", False)  # absent in a snapshot of an older state of the kit
        self.saved = position["epoch"], position["step"], position["ended"], self.finished
        self.epoch, self.step, self.ended = position["epoch"], position["step"], position["ended"]
        self.step_count, self.loss_sum, self.lr = position["step_count"], position["loss_sum"], position["lr"]
        at = f"{self.args.snapshot} after {self._at()}"
        if self._left() or self._epochs_left():
            ranks.say(f"goes on from {at}")
        else:
            ranks.say(f"nothing left to train in {at}: to go on, raise --epochs{' or --steps' * bool(self.args.steps)}")

    def _at(self):
        return f"step {self.step}/{self.sampler.steps} of epoch {self.epoch + 1}, {self.step_count} in all"

    def _where(self):
        if self.doing != "training":
            return self.doing
        return f"step {min(self.step + 1, self.sampler.steps)}/{self.sampler.steps} of epoch {self.epoch + 1}"

    def _left(self):
        """How many steps are left in this epoch."""
        left = 0 if self.ended else self.sampler.steps - self.step
        return max(0, min(left, (self.args.steps or math.inf) - self.step_count))

    def _epochs_left(self):
        return self.epoch + 1 < self.args.epochs and self.step_count < (self.args.steps or math.inf)

    def epochs(self):
        """Iterate over the numbers of the epochs, from 0; after the last, compare the ranks' weights and report."""
        while True:  # an epoch whose steps were all taken is entered again, for its evaluation alone
            if not self.finished or self._left() or not self._epochs_left():
                yield self.epoch
            self._settle()
            self.finished = False
            if not self._epochs_left():
                break
            self.epoch, self.step, self.loss_sum, self.ended = self.epoch + 1, 0, 0.0, False
        self._finish()

    def batches(self):
        """Iterate over the micro-batches that are left of the epoch. `step_due` is true with the last of each step.

        Give each loss to `record`, and take an optimizer step where one is due. A `break` that all ranks make at the
        same step ends the epoch early. Raises `UserError` on a rank that does not record or step, `RunError` on all
        ranks, about a second later at most, where a loss is not finite.
        """
        self._settle()
        self.sampler.set_epoch(self.epoch, self.step)
        steps = self._left()
        self.doing, self.in_batches, self.began = "training", True, time.perf_counter()
        title = f"epoch {self.epoch + 1}/{self.args.epochs}"
        # disable=None: no bar where stderr is no terminal
        with tqdm(total=steps, desc=title, leave=False, disable=None if ranks.rank() == 0 else True) as self.bar:
            batches = iterate(self.loader) if steps else None
            try:
                for _ in range(steps):
                    for left in reversed(range(self.args.accum)):
                        if left:
                            with self._local_gradients():
                                yield next(batches)
                        else:
                            self._before_step()
                            yield next(batches)
                        self._check_recorded(self.args.accum - left)
                    self._after_step()
            except GeneratorExit:
                self.broken = True
                raise
        self._close()

    @contextlib.contextmanager
    def _local_gradients(self):
        """The ranks add their gradients up, and communicate with the last micro-batch of a step alone."""
        if hasattr(self.wrapped, "set_requires_gradient_sync"):  # FSDP2
            self.wrapped.set_requires_gradient_sync(False)
            try:
                yield
            finally:  # also after a break
                self.wrapped.set_requires_gradient_sync(True)
        else:
            with getattr(self.wrapped, "no_sync", contextlib.nullcontext)():
                yield

    def record(self, loss):
        """Count a micro-batch with its loss, a scalar: the mean over it. It is read about once a second."""
        loss = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(loss)
        if loss.ndim:
            raise UserError(f"run.record: the loss has the shape {list(loss.shape)}, but must be a scalar, the mean")
        self.recorded += 1
        self.step_loss = loss if self.step_loss is None else self.step_loss + loss

    # ------------------------------------------------------------------------------------------- steps

    def _before_step(self):
        self.step_due, self.stepped = True, 0
        self.lr = self.optimizers[0].param_groups[0]["lr"] if self.optimizers else None
        # What the scale is now, without waiting for it: a step that fp16 skips changes it.
        self.scales = [scaler.scale(torch.ones((), device=self.device)) for scaler in self.scalers]

    def _count_step(self, optimizer, args, kwargs):
        if not self.step_due:
            raise UserError(
                f"an optimizer stepped{self._on_rank()} in {self._where()} before all of the step's {self.args.accum} "
                "micro-batches were seen: step where run.step_due is true"
            )
        self.stepped += 1
        if not self.gradients_checked:
            self._check_gradients()

    def _has_stepped(self):
        if self.stepped or not self.optimizers:
            return True
        return any(one.get_scale() != scale.item() for one, scale in zip(self.scalers, self.scales, strict=True))

    def _check_recorded(self, expected):
        if self.recorded != expected:
            raise UserError(
                f"run.record(loss) was called {self.recorded} times for {expected} micro-batches of {self._where()}"
                f"{self._on_rank()}: call it once for each"
            )

    def _on_rank(self):
        return f" on rank {ranks.rank()}" if ranks.world_size() > 1 else ""

    def _after_step(self):
        if not self._has_stepped():
            raise UserError(
                f"no optimizer stepped in {self._where()}{self._on_rank()}: where run.step_due is true, call "
                "scaler.step(optimizer), or optimizer.step(), of an optimizer that is named in Run"
            )
        self._count()
        if found := self.in_training.most(lambda: [self._signal(), self._look_at_losses(), self._save_failed()]):
            stop, bad, failed = found
            if bad:
                self._refuse_bad_losses()
            if failed:
                self.snapshots.finish()
            if stop:
                self._stop(int(stop))
        if self.args.save_every and self.step_count % self.args.save_every == 0:
            self._save()

    def _count(self):
        """Count a step that was taken."""
        self.step_due, self.step, self.step_count = False, self.step + 1, self.step_count + 1
        self.samples += self.args.batch_size
        self.losses.append(self.step_loss / self.args.accum if self.args.accum > 1 else self.step_loss)
        self.rates.append(math.nan if self.lr is None else float(self.lr))
        self.step_loss, self.recorded = None, 0
        self.bar.update()
        if self.output.wanted and self.step_count % self.args.log_every == 0:
            loss = ranks.total(self.losses[-1].double()).item() / ranks.world_size()
            if not math.isfinite(loss):
                self._sum_losses()  # tells which
            self.output.write("step", {}, epoch=self.epoch + 1, step=self.step_count, loss=loss, lr=float(self.lr))

    def _settle(self):
        """Come to terms with a `break` in the loop over the micro-batches: all ranks must have made it."""
        if not self.broken:
            return
        self.broken, taken = False, self.step_due and self.recorded == self.args.accum and self._has_stepped()
        if process.watch and not process.watch.all_leave(f"step {self.step_count + taken}"):
            raise RunError(
                f"rank {ranks.rank()} left the loop over the batches in {self._where()}, and others did not: break on "
                "all ranks at the same step, for example by what run.evaluate returns, which is the same on all"
            )
        if taken:
            self._count()
        self.step_due, self.step_loss, self.recorded, self.ended = False, None, 0, True
        for parameter in self.wrapped.parameters():
            parameter.grad = None  # of micro-batches without a step
        self._close()

    def _close(self):
        """Close the loop over the micro-batches of an epoch."""
        self.in_batches = False
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - self.began
        if self.snapshots:
            self._save()
        self._sum_losses()
        self.loss = self.loss_sum / self.step if self.step else None

    def _check_gradients(self):
        """Tell which parameters no gradient reaches. Raises `UserError` where DDP would wait for it."""
        self.gradients_checked = True
        names = [name for name, value in self.model.named_parameters() if value.requires_grad and value.grad is None]
        if not names:
            return
        line = f"no gradient reaches {few(names)}"
        if isinstance(self.wrapped, DDP) and not (self.wrapped.find_unused_parameters or self.wrapped.static_graph):
            raise UserError(
                f"{line}: use them in forward, set requires_grad=False, or give DDP find_unused_parameters=True"
            )
        ranks.say(line)

    # ------------------------------------------------------------------------------------------ losses

    def _look_at_losses(self):
        """Add this rank's new losses to its share. Returns whether one is not finite, as `bad_loss` then has it."""
        losses = torch.stack(self.losses).tolist() if self.losses else []
        for step, (loss, rate) in enumerate(zip(losses, self.rates, strict=True), self.step_count - len(losses) + 1):
            self.loss_share += loss  # one by one: the sum shall not depend on when this is called
            if not math.isfinite(loss) and not self.bad_loss[0]:
                self.bad_loss = step, loss, rate
        if losses and self.in_batches:
            self.bar.set_postfix(loss=f"{losses[-1]:.4g}", refresh=False)
        self.losses, self.rates = [], []
        return self.bad_loss[0] > 0

    def _refuse_bad_losses(self):
        """Raise `RunError`, since `_look_at_losses` of some rank has found one."""
        if self.snapshots:
            self.snapshots.finish()  # which is of a step before
        found = ranks.gather(self.bad_loss, self.device)
        step = found[:, 0][found[:, 0] > 0].min()
        where = (found[:, 0] == step).nonzero().flatten().tolist()
        names = process.watch.names(where) if process.watch else "this process"
        saved = f"; {self.args.snapshot} is of a step before" if self.saved is not None else ""
        raise RunError(
            f"the loss of {names} is {found[where[0], 1]} in step {step - self.step_count + self.step:.0f}/"
            f"{self.sampler.steps} of epoch {self.epoch + 1}, {step:.0f} in all, at learning rate "
            f"{found[where[0], 2]:g}: lower --lr, or try --clip 1{saved}"
        )

    def _sum_losses(self):
        """Add the losses since the last call, which are each rank's own, to the epoch's sum of mean losses."""
        bad = self._look_at_losses()
        bad, loss = ranks.total(torch.tensor([bad, self.loss_share], dtype=torch.float64, device=self.device)).tolist()
        if bad:
            self._refuse_bad_losses()
        self.loss_sum += loss / ranks.world_size()
        self.loss_share = 0.0

    # ----------------------------------------------------------------------------------- saving, stopping

    def _save(self):
        position = {"epoch": self.epoch, "step": self.step, "step_count": self.step_count, "ended": self.ended}
        position["finished"] = self.finished
        if self.saved != (self.epoch, self.step, self.ended, self.finished):
            if not self.names_checked:
                self._check_names()
            self._sum_losses()
            rate = None if self.lr is None else float(self.lr)
            self.snapshots.save(position | {"loss_sum": self.loss_sum, "lr": rate})
            self.saved = self.epoch, self.step, self.ended, self.finished

    def _check_names(self):
        """Raise `UserError` where an optimizer of the model, or its schedule, is not named."""
        self.names_checked = True
        weights = set(map(id, self.wrapped.parameters()))
        named, unseen = set(), [one for one in self.named.values() if isinstance(one, (LRScheduler, Optimizer))]
        while unseen:  # SequentialLR and ChainedScheduler hold others
            one = unseen.pop()
            named.add(id(one))
            unseen += [inner for inner in getattr(one, "_schedulers", []) if id(inner) not in named]
        for one in gc.get_objects():
            if not issubclass(type(one), (LRScheduler, Optimizer)) or id(one) in named:
                continue
            optimizer = one if isinstance(one, Optimizer) else getattr(one, "optimizer", None)
            if optimizer and any(id(value) in weights for group in optimizer.param_groups for value in group["params"]):
                raise UserError(
                    f"the script has a {type(one).__name__} that is not named in Run, so that a snapshot would lose "
                    "it: write Run(…, name=it)"
                )

    def _save_failed(self):
        return self.snapshots is not None and self.snapshots.failed()

    def _signal(self):
        return self.stop.received if self.stop else 0

    def _stop(self, number):
        self._save()
        self.snapshots.finish()
        name = signal.Signals(number).name
        ranks.say(f"stopped by {name} after {self._at()}: the same command goes on from {self.args.snapshot}")
        process.at_end.close()
        raise Stopped(number)

    # -------------------------------------------------------------------------------- evaluation, reports

    @torch.no_grad()
    def evaluate(self, data, name="test"):
        """Evaluate the model on a dataset, each sample once, with `job.score`; report the means over the samples.

        Returns {score: mean}, the same on all ranks. name: of the set, where there are several. Modules come back in
        the mode in which each was. Raises `UserError` where the set is empty, or the scores are no sums.
        """
        self._settle()
        doing, began = self.doing, time.perf_counter()
        self.doing = f"the evaluation after {self._at() if self.in_batches else f'epoch {self.epoch + 1}'}"
        if name not in self.test_loaders or self.test_loaders[name].dataset is not data:
            check_set(f"{name} set", data)
            self.test_loaders[name] = test_loader(data, self.args, self.device, self.loader.collate_fn)
        loader, sums, mine = self.test_loaders[name], {}, {}
        ranks.share_buffers(self.model)
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        device = next(self.model.parameters()).device
        for count, (inputs, labels) in zip(loader.batch_sampler.counts, iterate(loader), strict=True):
            with torch.autocast(self.args.device, self.args.dtype, enabled=self.args.dtype is not None):
                outputs = self.model(move(inputs, device))
                scores = job.score(outputs, move(labels, _device_of(outputs, device)))
            for key, value in _sums(scores).items() if count else []:
                mine.setdefault(key, []).append(value)
            found = None if self.in_batches else self.in_evaluation.most(lambda: [self._signal()])
            if found and found[0]:
                self._stop(int(found[0]))
        for module, mode in modes:
            module.training = mode
        # A rank may lack a score that only some samples have.
        for there in ranks.gather_objects({key: sum(torch.stack(some).tolist()) for key, some in mine.items()}):
            for key, value in there.items():
                sums[key] = sums.get(key, 0) + value
        self.scores, self.evaluated = {key: value / len(data) for key, value in sums.items()}, name
        self.doing = doing if self.in_batches else f"the end of epoch {self.epoch + 1}"
        words = [f"{name} {key} {value:.4g}" for key, value in self.scores.items()]
        step = self.step_count + bool(self.step_due and self.stepped)  # the step is counted when the loop goes on
        if self.in_batches:
            self.began += time.perf_counter() - began
            ranks.say(f"step {step}: {', '.join(words)}")
        else:
            ranks.say(f"epoch {self.epoch + 1}/{self.args.epochs}: {', '.join([*self._training(), *words])}")
        self.output.write("eval", self.scores, epoch=self.epoch + 1, step=step, set=name, total=len(data))
        return self.scores

    def _training(self):
        """The epoch's loss and the last learning rate in words, as far as there are."""
        loss = [] if self.loss is None else [f"loss {self.loss:.4f}"]
        return loss if self.lr is None else [*loss, f"lr {float(self.lr):.4g}"]

    def log(self, **values):
        """Log what the user measures, numbers or scalar tensors of rank 0, every --log-every steps."""
        step = self.step_count + bool(self.step_due)
        if self.output.wanted and not (self.in_batches and step % self.args.log_every):
            self.output.write("log", values, epoch=self.epoch + 1, step=step)

    def _finish(self):
        self.doing = "the end"
        if self.snapshots:
            self.finished = True  # what follows the last evaluation, such as the best weights, is saved as well
            self._save()
            self.snapshots.finish()
        ranks.check_same_weights(self.model, self.device)
        speed = self.samples / self.seconds if self.seconds else 0.0
        steps = f"{self.epoch + 1} epochs, {self.step_count} steps"
        scores = [f"{self.evaluated} {key} {value:.4g}" for key, value in self.scores.items()]
        device, memory = torch.get_device_module(self.device), ""
        if self.device.type != "cpu" and hasattr(device, "max_memory_allocated"):
            peaks = [device.max_memory_allocated(one) / 2**20 for one in states.devices(self.wrapped)]
            peaks = ranks.gather(peaks, self.device).flatten().tolist()
            memory = f", peak memory per device {min(peaks):.0f} to {max(peaks):.0f} MiB"
        ranks.say(f"done: {', '.join([steps, *self._training(), *scores])}, {speed:.0f} samples/s{memory}")
        end = {"step": self.step_count, "loss": self.loss, "samples_per_s": speed, "world_size": ranks.world_size()}
        self.output.write("end", self.scores, **end, weights_sha256=weights_sha256(self.model))


def arrange_gradients(model):
    """Let DDP arrange the gradients now, the last parameter's first, and not after its first backward pass.

    From that on three ranks and more add them up in another order, so that a run that goes on after a resume, whose
    first backward is a later one, would differ in the last digits. So each run has one order from its first step on.
    With `find_unused_parameters=True` DDP keeps its first order. With `static_graph=True` it allows no backward but the
    model's own: such a run differs in the last digits.
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


def _device_of(value, default):
    """The device of the first tensor in a nested value."""
    if isinstance(value, torch.Tensor):
        return value.device
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []:
        if found := _device_of(item, None):
            return found
    return default


def _sums(scores):
    """What `job.score` returned, as scalar tensors. Raises `UserError` where that is not {name: scalar}."""
    if not isinstance(scores, dict):
        raise UserError(f"job.score returned a {type(scores).__name__}: return {{name: sum over the samples}}")
    sums = {name: torch.as_tensor(value) for name, value in scores.items()}
    for name, value in sums.items():
        if value.ndim:
            raise UserError(f"job.score returned {name} of the shape {list(value.shape)}: return its sum, a scalar")
    return sums


def weights_sha256(model):
    """Digest of the parameters' bytes in the order of `state_dict`, gathered where they are sharded."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class Log:
    """Metrics for programs (one JSON object a line) and for TensorBoard, written by rank 0 alone."""

    def __init__(self, args):
        self.args, self.wanted = args, bool(args.metrics or args.tensorboard)
        self.lines = self.board = None

    def open(self):
        """Raises `UserError` where it cannot write, and leaves nothing behind then."""
        metrics, new = self.args.metrics, False
        if metrics:
            try:
                new = not metrics.exists()
                if metrics.is_file() and metrics.open("rb").read(1) not in (b"", b"{"):
                    raise UserError(f"--metrics {metrics}: there is a file of another kind, which is kept")
                self.lines = metrics.open("a", buffering=1, encoding="utf-8")
            except OSError as error:
                raise UserError(f"--metrics {metrics}: {error.strerror}") from None
        if self.args.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(self.args.tensorboard)
            except (ImportError, OSError, UnicodeError) as error:
                if new:
                    metrics.unlink()
                if isinstance(error, ImportError):
                    raise UserError("--tensorboard needs the package: pip install tensorboard") from None
                raise UserError(f"--tensorboard {self.args.tensorboard}: {describe(error)}") from None
        self.write("start", {}, **vars(self.args), torch=torch.__version__, world_size=ranks.world_size())

    def write(self, event, measured, **values):
        """Write what was measured, {name: number or scalar tensor}, with the event's own values.

        A name that the event has itself, such as the score `loss` at the end, gets the prefix `test_`.
        """
        if not self.lines and not self.board:
            return
        measured = {name: value.item() if hasattr(value, "item") else value for name, value in measured.items()}
        if self.lines:
            line = {"event": event, **values}
            line |= {f"test_{name}" if name in line else name: value for name, value in measured.items()}
            line = {name: value if _is_json(value) else str(value) for name, value in line.items()}
            try:
                self.lines.write(json.dumps(line) + "\n")
            except OSError as error:
                raise RunError(f"--metrics {self.args.metrics}: {error.strerror}") from None
        if self.board and event in ("step", "eval", "log"):
            own = {name: values[name] for name in ("loss", "lr") if event == "step"}
            for name, value in (own | measured).items():
                if isinstance(value, (int, float)):
                    name = f"{values['set']}/{name}" if event == "eval" else name
                    self.board.add_scalar(name, value, values["step"])
            self.board.flush()


def _is_json(value):
    """Whether JSON has this: of numbers it has no nan and no inf."""
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, (bool, int, str, type(None)))

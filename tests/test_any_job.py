"""What a user adds first (a schedule, another metric, other batches) keeps every promise, or is refused with a word."""

import json
import math
import shutil
from pathlib import Path

from common import job

import pytest
import torch
from harness import TORCH, forked, forked_ranks

SNAPSHOT = ("--snapshot", "run.pt", "--save-every", "5")
ALONE = forked("ddp_torchrun.py")
SPAWN = forked("ddp_spawn.py")
PARALLEL = forked("dp_train.py")
slow = pytest.mark.slow

# Lines of the scripts and of the job, which the tests edit as a user would.
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)\n"
SCHEDULE = "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))"
NAMED = "schedule=schedule, scaler=scaler)\n"
RUN = "    run = Run("
RECORD = "            run.record(loss)\n"
STEP = "                scaler.step(optimizer)\n"
ZERO = "                optimizer.zero_grad()\n"
EVALUATE = "        run.evaluate(test_set)\n"
SCORE = '    return {"accuracy": (outputs.argmax(1) == labels).sum(), "loss": losses}\n'
LAYER = "        self.net2 = nn.Linear(64, 10)\n"
FORWARD = "        return self.net2(self.relu(self.net1(pixels)))\n"
SETS = "    return TensorDataset(pixels[~in_test], labels[~in_test]), TensorDataset(pixels[in_test], labels[in_test])\n"
DIE = f"{ZERO}                if os.environ.get('DIE') == str(run.step_count):\n                    os._exit(9)\n"


def append(kit, code, name="common/job.py"):
    with (kit.path / name).open("a") as file:
        file.write(code)


def run(kit, command, *options, status=0, env=None):
    """Run to the end; the result has its metrics too."""
    (kit.path / "m").unlink(missing_ok=True)
    result = kit.run(*command, "--metrics", "m", *options, env=env)
    assert result.status == status, result
    result.metrics = kit.metrics("m")
    return result


def refused(kit, command, *options, status=2):
    result = run(kit, command, *options, status=status)
    assert len(result.errors) == 1 and "Traceback" not in result.err, result
    return result.errors[0].removeprefix("error: ")


def states(kit, name):
    saved = torch.load(kit.path / name, weights_only=True)
    return {key: value for key, value in saved.items() if key != "run"}


def same(one, other):
    """Whether two nested states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def goes_on_exactly(kit, command, *options, epochs=3):
    """Kill a run in its second epoch, go on, and compare all that is named with an undisturbed run's; both results."""
    script = command[1]
    kit.edit(script, ZERO, DIE)
    kit.edit(script, "import torch\n", "import os\n\nimport torch\n")
    options = ("--epochs", epochs, *options)
    undisturbed = run(kit, command, *options, "--snapshot", "whole.pt")
    killed = kit.start(*command, *options, *SNAPSHOT, env={"DIE": "23"}).result()
    assert killed.status != 0 and not killed.processes
    resumed = run(kit, command, *options, *SNAPSHOT)
    assert "goes on from run.pt after step " in resumed.out
    expected, found = states(kit, "whole.pt"), states(kit, "run.pt")
    assert expected.keys() == found.keys()
    assert [key for key in expected if not same(expected[key], found[key])] == []
    rates = [[line["lr"] for line in result.metrics if line["event"] == "step"] for result in (undisturbed, resumed)]
    assert rates[1] == rates[0][-len(rates[1]) :]
    for result in (undisturbed, resumed):
        result.end = result.metrics[-1]
    assert undisturbed.end["weights_sha256"] == resumed.end["weights_sha256"]
    return undisturbed, resumed


# --------------------------------------------------------------------------------------------- what is named is saved


@pytest.mark.parametrize(
    "schedule",
    [
        "torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)",
        pytest.param("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)", marks=slow),
        pytest.param("torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, steps)", marks=slow),
        pytest.param(
            "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), "
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)], [9])",
            marks=slow,
        ),
    ],
    ids=["StepLR", "cosine", "one-cycle", "sequential"],
)
def test_schedules(kit, schedule):
    kit.edit("common/job.py", SCHEDULE, schedule)
    undisturbed, _ = goes_on_exactly(kit, ALONE)
    assert len({line["lr"] for line in undisturbed.metrics if line["event"] == "step"}) > 2


@pytest.mark.parametrize(
    "command", [SPAWN, pytest.param(forked_ranks(3, "ddp_torchrun.py"), marks=slow)], ids=["spawn", "three"]
)
def test_ema_second_optimizer_best_value_and_generator(kit, command):
    """As a user adds them to the script; NumPy's numbers among them, which torch would not read again."""
    script = command[1]
    kit.edit(
        script,
        RUN,
        "    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)\n"
        "    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)\n"
        "    second, best = torch.optim.Adam(model.net2.parameters(), 1e-3), {'loss': numpy.float64(1e9)}\n"
        f"    generator = torch.Generator().manual_seed(args.seed)\n{RUN}",
    )
    kit.edit(script, NAMED, NAMED.replace(")", ", ema=ema, second=second, best=best, noise=generator)"))
    kit.edit(script, RECORD, "            inputs[0, 0] += torch.rand((), generator=generator)\n" + RECORD)
    noise = "            inputs, labels = move(inputs, device), move(labels, device)\n"
    kit.edit(script, noise, noise + "            inputs += 0.1 * torch.rand(inputs.shape, generator=generator)\n")
    kit.edit(script, STEP, f"{STEP}                second.step()\n                ema.update_parameters(model)\n")
    code = "        best['loss'] = min(best['loss'], numpy.float64(run.evaluate(test_set)['loss']))\n"
    kit.edit(script, EVALUATE, f"{code}        run.evaluate(test_set, 'ema', ema)\n")
    text = (kit.path / script).read_text()
    (kit.path / script).write_text(f"import numpy\n{text}")
    undisturbed, _ = goes_on_exactly(kit, command)
    saved = states(kit, "run.pt")
    model, test_set = job.ToyModel(), job.load_data()[1]
    model.load_state_dict({name.removeprefix("module."): saved["ema"][name] for name in list(saved["ema"])[1:]})
    right = (model(test_set.tensors[0]).argmax(1) == test_set.tensors[1]).sum().item()
    evaluated = [line["accuracy"] for line in undisturbed.metrics if line.get("set") == "ema"]
    assert evaluated[-1] == pytest.approx(right / len(test_set)), "of the average, not of the model"
    assert 0 < saved["best"]["loss"] < 1 and len(saved["second"]["state"]) == 2
    assert not same(saved["ema"]["module.net2.bias"], saved["model"]["net2.bias"])


def test_model_in_place_of_a_name_is_refused(kit):
    kit.edit("dp_train.py", EVALUATE, EVALUATE.replace("test_set", "test_set, model"))
    assert refused(kit, PARALLEL) == "run.evaluate: the name is a ToyModel: write run.evaluate(data, 'ema', ema)"


@pytest.mark.parametrize("command", [PARALLEL, pytest.param(SPAWN, marks=slow)], ids=["dp", "spawn"])
def test_early_stopping(kit, command):
    """A break out of the epochs: what its evaluation brought is saved; the same command stops there again."""
    kit.edit(command[1], RUN, f"    best = {{'accuracy': 0}}\n{RUN}")
    kit.edit(command[1], NAMED, NAMED.replace(")", ", best=best)"))
    code = "        best.update(run.evaluate(test_set))\n        if run.epoch == 1: break\n"
    kit.edit(command[1], EVALUATE, code)
    first = run(kit, command, *SNAPSHOT)
    assert "done: 2 epochs, 28 steps, " in first.out
    *_, evaluated, end = first.metrics
    assert (evaluated["event"], end["event"], end["step"]) == ("eval", "end", 28)
    assert states(kit, "run.pt")["best"]["accuracy"] == evaluated["accuracy"] == end["accuracy"]
    second = run(kit, command, *SNAPSHOT)
    assert second.metrics[-1]["weights_sha256"] == end["weights_sha256"] and second.metrics[-1]["step"] == 28


def test_what_follows_the_last_evaluation_is_saved(kit):
    """The best value of the last epoch, and once: a schedule that is stepped there goes on exactly."""
    kit.edit("dp_train.py", RUN, f"    best = {{'accuracy': 0}}\n{RUN}")
    kit.edit("dp_train.py", NAMED, NAMED.replace(")", ", best=best)"))
    kit.edit("dp_train.py", "                schedule.step()\n", "")
    code = (
        "        scores = run.evaluate(test_set)\n        best.update(scores)\n        schedule.step(-scores['loss'])\n"
    )
    kit.edit("dp_train.py", EVALUATE, code)
    kit.edit("common/job.py", SCHEDULE, "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)")
    first = run(kit, PARALLEL, "--epochs", "2", "--lr", "0.01", *SNAPSHOT)
    assert states(kit, "run.pt")["best"]["accuracy"] == first.metrics[-1]["accuracy"]
    run(kit, PARALLEL, "--epochs", "2", "--lr", "0.01", *SNAPSHOT)
    more = run(kit, PARALLEL, "--epochs", "5", "--lr", "0.01", *SNAPSHOT)
    whole = run(kit, PARALLEL, "--epochs", "5", "--lr", "0.01", "--snapshot", "whole.pt")
    rates = [[line["lr"] for line in result.metrics if line["event"] == "step"] for result in (more, whole)]
    assert rates[0] == rates[1][28:] and len(set(rates[1])) == 2
    assert same(states(kit, "run.pt"), states(kit, "whole.pt"))


def test_a_longer_run_of_a_schedule_that_is_a_function_is_refused(kit):
    """Its function is not saved, and the run would go on with other rates."""
    kit.edit("common/job.py", SCHEDULE, SCHEDULE.replace("min(1, (step + 1) / 20)", "min(1, 2 - 2 * step / steps)"))
    run(kit, PARALLEL, "--epochs", "2", *SNAPSHOT)
    saved = (kit.path / "run.pt").read_bytes()
    assert refused(kit, PARALLEL, "--epochs", "3", *SNAPSHOT) == (
        "the schedule gives the rate 0.133333 after 28 steps, that of the snapshot gave 0: change back what it depends "
        "on, such as --epochs, or give another path to start anew"
    )
    assert (kit.path / "run.pt").read_bytes() == saved


@slow
def test_dataset_with_a_generator_of_its_own(kit):
    """Named, it is repeated after a resume; each rank draws from its own."""
    kit.edit("common/job.py", SETS, SETS.replace("return TensorDataset", "return Noisy", 1))
    append(
        kit,
        "\n\nclass Noisy(TensorDataset):\n    generator = torch.Generator()\n\n    def __getitem__(self, index):\n"
        "        pixels, label = super().__getitem__(index)\n        while True:\n"
        "            noise = torch.rand((), generator=self.generator)\n            if noise > 0.1 * (index % 5):\n"
        "                return pixels + noise, label\n",
    )
    kit.edit("ddp_spawn.py", NAMED, NAMED.replace(")", ", noise=train_set.generator)"))
    goes_on_exactly(kit, SPAWN)


def test_other_hyperparameters_are_refused(kit):
    run(kit, ALONE, "--steps", "3", *SNAPSHOT)
    job = (kit.path / "common/job.py").read_text()
    for old, new, words in [
        ("momentum=0.9", "momentum=0.5", "optimizer's momentum 0.9, this run has 0.5"),
        ("momentum=0.9", "momentum=0.9, weight_decay=0.1", "optimizer's weight_decay 0, this run has 0.1"),
        (
            SCHEDULE,
            "torch.optim.lr_scheduler.StepLR(optimizer, 9)",
            "schedule's class LambdaLR, this run has StepLR",
        ),
        (
            "torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)",
            "torch.optim.Adam(model.parameters())",
            "class SGD, this run has Adam",
        ),
    ]:
        kit.edit("common/job.py", old, new)
        line = refused(kit, ALONE, *SNAPSHOT)
        assert line.startswith("--snapshot run.pt is of a run with ") and words in line, line
        assert line.endswith("change that back, or give another path to start anew")
        (kit.path / "common/job.py").write_text(job)
    kit.edit("ddp_torchrun.py", NAMED, NAMED.replace(")", ", best={})"))
    line = refused(kit, ALONE, *SNAPSHOT)
    assert "with the names model, optimizer, scaler, schedule, this run has best, model, " in line
    kit.edit("ddp_torchrun.py", "best={}", "best=1.5")
    assert "Run(…, best=…) is a float: what is named needs state_dict" in refused(kit, ALONE)


@pytest.mark.parametrize("command, name", [(ALONE, "LambdaLR"), pytest.param(SPAWN, "Adam", marks=slow)])
def test_what_is_not_named_is_refused(kit, command, name):
    if name == "Adam":
        kit.edit(command[1], RUN, f"    second = torch.optim.Adam(model.parameters())\n{RUN}")
        kit.edit(command[1], STEP, f"{STEP}                second.step()\n")
    else:
        kit.edit(command[1], NAMED, "scaler=scaler)\n")
    line = refused(kit, command, *SNAPSHOT)
    assert line.startswith(f"the script has a {name} that is not named in Run, so that a snapshot would lose it")
    assert not (kit.path / "run.pt").exists()


@pytest.mark.parametrize(
    "value, where",
    [
        pytest.param("{'x': numpy.float32(1)}", "it holds code, numpy", marks=pytest.mark.versions),
        pytest.param(
            "{'x': [1, pathlib.Path('a')]}",
            "it holds code, pathlib.PosixPath",
            marks=slow,
        ),
        pytest.param("{pathlib.Path('a'): 1}", "it holds code, pathlib.PosixPath", marks=slow),
        pytest.param("{'x': Level.HIGH}", "it holds code, common.job.Level", marks=slow),
    ],
)
def test_what_could_not_be_read_again_is_refused(kit, value, where):
    append(kit, "\n\nimport enum  # noqa: E402\n\n\nclass Level(enum.IntEnum):\n    HIGH = 1\n")
    kit.edit(
        "ddp_torchrun.py",
        "from common import job\n",
        "import numpy, pathlib\nfrom common import job\nfrom common.job import Level\n",
    )
    kit.edit("ddp_torchrun.py", NAMED, NAMED.replace(")", ", best=best)"))
    kit.edit("ddp_torchrun.py", RUN, f"    best = {{}}\n{RUN}")
    kit.edit("ddp_torchrun.py", EVALUATE, f"{EVALUATE}        best.update({value})\n")
    line = refused(kit, ALONE, *SNAPSHOT)
    assert where in line and "was not written" in line and "only plain numbers" in line, line
    saved = torch.load(kit.path / "run.pt", weights_only=True)["run"]["position"]
    assert saved["step_count"] == 14, "the snapshot before is untouched"


@slow
def test_models_as_torch_has_them(kit):
    """A tied and a complex parameter, an extra state, a buffer that is not persistent."""
    dtype = torch.complex64 if TORCH >= (2, 13) else torch.float32  # older versions' DDP on gloo refuses a complex one
    kit.edit(
        "common/job.py",
        LAYER,
        f"{LAYER}        self.tied = self.net2.weight\n"
        f"        self.phase = nn.Parameter(torch.ones(10, dtype={dtype}))\n"
        "        self.register_buffer('calls', torch.zeros(()), persistent=False)\n        self.extra = {'seen': 0}\n\n"
        "    def get_extra_state(self):\n        return self.extra\n\n    def set_extra_state(self, state):\n"
        "        self.extra = state\n",
    )
    kit.edit(
        "common/job.py",
        FORWARD,
        "        self.extra['seen'] += self.training\n        self.calls += 1\n"
        f"{FORWARD.rstrip()} * (self.phase * self.phase.conj()).real.to(pixels.dtype)\n",
    )
    command = forked_ranks(3, "ddp_torchrun.py")
    goes_on_exactly(kit, command)
    saved = states(kit, "run.pt")["model"]
    assert saved["_extra_state"] == {"seen": 42} and "calls" not in saved
    assert saved["tied"].data_ptr() == saved["net2.weight"].data_ptr()


def test_versions_of_modules_are_loaded():
    """By them a module knows in which form an older one saved its state."""
    from common.states import set_state

    loaded = []

    class Versioned(torch.nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            loaded.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    layer = Versioned(1, 1)
    set_state(layer, layer.state_dict())
    assert loaded == [7]


@slow
@pytest.mark.parametrize("code", ["find_unused_parameters=True,", "bucket_cap_mb=0.01,"])
def test_other_order_of_gradients(kit, code):
    views = "        gradient_as_bucket_view=True,"
    kit.edit("ddp_torchrun.py", views, f"{views} {code}")
    goes_on_exactly(kit, forked_ranks(3, "ddp_torchrun.py"))


# -------------------------------------------------------------------------------------------- evaluation of any set


def test_scores_are_means_over_the_samples(kit):
    """At any world size: a score that is no count, scores that only some samples have, several sets in a run."""
    kit.edit(
        "common/job.py",
        SCORE,
        "    sums = {'margin': outputs.softmax(1).amax(1).sum(), 'four': 4 * len(labels)}\n"
        "    sums |= {f'digit {digit}': (labels == digit).sum() for digit in labels.unique().tolist()}\n"
        "    return sums\n",
    )
    part = "torch.utils.data.Subset(train_set, range(200))"
    other = f"        found = run.evaluate({part}, 'part')\n        run.evaluate(test_set)\n"
    other += "        run.evaluate(torch.utils.data.Subset(train_set, range(2)), 'few')\n"  # fewer than ranks
    for script in (ALONE[1], SPAWN[1]):
        kit.edit(script, EVALUATE, f"{EVALUATE}{other}        run.log(same=found['digit 3'])\n")
    one = run(kit, ALONE, "--epochs", "1")
    two = run(kit, (*SPAWN, "--nprocs", "3"), "--epochs", "1")
    evals = [[line for line in result.metrics if line["event"] == "eval"] for result in (one, two)]
    for ours, theirs in zip(*evals, strict=True):
        assert ours.keys() == theirs.keys() and ours["set"] == theirs["set"]
        numbers = [key for key in ours if key not in ("event", "set")]
        assert [ours[key] for key in numbers] == pytest.approx([theirs[key] for key in numbers], rel=1e-5)
    test, part, again, few = evals[0]
    assert (test["set"], part["set"], test["total"], part["total"]) == ("test", "part", 359, 200)
    assert test == again and test["four"] == few["four"] == 4 and 0.1 < test["margin"] < 1
    digits = [part[f"digit {digit}"] for digit in range(10)]
    assert sum(digits) == pytest.approx(1) and all(200 * share == pytest.approx(round(200 * share)) for share in digits)
    assert [line["same"] for line in two.metrics if line["event"] == "log"] == [part["digit 3"]]


@pytest.mark.parametrize(
    "score, words",
    [
        ("(outputs.argmax(1) == labels).sum()", "job.score returned a Tensor: return {name: sum over the samples, a "),
        ("{'right': outputs.argmax(1) == labels}", "job.score returned a dict: return {name: sum over the samples, a "),
    ],
)
def test_scores_that_are_none(kit, score, words):
    kit.edit("common/job.py", SCORE, f"    return {score}\n")
    assert words in refused(kit, PARALLEL)


def test_modes_and_collate_of_the_user(kit):
    """What the user froze by eval() stays so; the evaluation takes the job's collate."""
    kit.edit("common/job.py", "collate = None  # the loaders' `collate_fn`; None: torch's own\n", "")
    append(
        kit,
        "\n\ndef collate(samples):\n    pixels, labels = zip(*samples)\n"
        "    return {'pixels': 2 * torch.stack(pixels)}, torch.stack(labels)\n",
    )
    kit.edit(
        "common/job.py",
        FORWARD,
        "        print('twice', round(pixels['pixels'].max().item()), self.training, self.relu.training)\n"
        + FORWARD.replace("pixels", "pixels['pixels']"),
    )
    kit.edit("dp_train.py", RUN, f"    model.relu.eval()\n{RUN}")
    result = run(kit, PARALLEL, "--epochs", "2")
    lines = [line for line in result.out.splitlines() if line.startswith("twice")]
    training, testing = ["twice 2 True False"] * 14, ["twice 2 False False"] * 4
    assert lines == training + testing + training + testing


@pytest.mark.parametrize(
    "sets, words",
    [
        (SETS.replace("pixels[in_test], labels[in_test]", "pixels[:0], labels[:0]"), "the test set is empty"),
        (
            "    return iter([]), TensorDataset(pixels, labels)\n",
            "the train set is a list_iterator, which has no samples",
        ),
        ("    return Stream(), TensorDataset(pixels, labels)\n", "the train set is a Stream, which has no samples to"),
    ],
    ids=["empty", "iterator", "IterableDataset"],
)
def test_sets_that_are_none(kit, sets, words):
    kit.edit("common/job.py", SETS, sets)
    append(
        kit, "\n\nclass Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        return iter([])\n"
    )
    result = run(kit, SPAWN, status=2)
    assert len(result.errors) == 1 and words in result.errors[0] and "epoch 1" not in result.out


# ------------------------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize(
    "old, new, words",
    [
        pytest.param(
            STEP, "", " in step 1/14 of epoch 1: no optimizer stepped after 1 of 1 micro-batches: ", marks=slow
        ),
        (
            STEP,
            f"                if rank == 0 or run.step_count != 20:\n    {STEP}",
            "rank 1 in step 7/14 of epoch 2: no optimizer stepped after 1 of 1 micro-batches: ",
        ),
        (RECORD, "", " in step 1/14 of epoch 1: run.record(loss) was called 0 times for 1 micro-batches"),
        pytest.param(
            "            if run.step_due:",
            "            if True:",
            " in step 1/14 of epoch 1: an optimizer stepped after 1 of 2 micro-batches",
            marks=slow,
        ),
        pytest.param(RECORD, "            run.record(loss.repeat(2))\n", "the loss has the shape [2]", marks=slow),
    ],
    ids=["no step", "no step on one rank", "no record", "too many steps", "no scalar"],
)
def test_steps_that_are_none(kit, old, new, words):
    kit.edit("ddp_spawn.py", old, new)
    assert words in refused(kit, SPAWN, *(["--accum", "2"] if "True" in new else []))


@slow
def test_step_without_the_scaler(kit):
    """`optimizer.step()` is a step like any other."""
    kit.edit("ddp_torchrun.py", STEP, "                optimizer.step()\n")
    kit.edit("ddp_torchrun.py", "                scaler.unscale_(optimizer)\n", "")
    kit.edit("ddp_torchrun.py", "                scaler.update()\n", "")
    assert run(kit, ALONE, "--epochs", "2").metrics[-1]["step"] == 28


def test_fp16_skips_a_step(kit):
    """Its first scale is too large here; the run goes on with a smaller one."""
    kit.edit("ddp_spawn.py", 'enabled=args.precision == "fp16")', '2.0**40, enabled=args.precision == "fp16")')
    result = run(kit, SPAWN, "--epochs", "2", "--precision", "fp16", *SNAPSHOT)
    assert result.metrics[-1]["step"] == 28 and states(kit, "run.pt")["scaler"]["scale"] < 2.0**40


@pytest.mark.parametrize("place", [RECORD, pytest.param(ZERO, marks=slow)], ids=["before the step", "after it"])
def test_break_on_all_ranks_ends_the_epoch(kit, place):
    indent = len(place) - len(place.lstrip())
    kit.edit("ddp_spawn.py", place, f"{place}{' ' * indent}if run.step_count == 20:\n{' ' * indent}    break\n")
    result = run(kit, SPAWN, "--epochs", "3", "--snapshot", "run.pt")
    taken = 20 if place == RECORD else 21
    assert f"done: 3 epochs, {taken + (place == ZERO) * 14} steps" in result.out and "epoch 2/3: loss 1." in result.out
    position = torch.load(kit.path / "run.pt", weights_only=True)["run"]["position"]
    assert (position["epoch"], position["ended"]) == (2, place == RECORD)
    again = run(kit, SPAWN, "--epochs", "3", "--snapshot", "run.pt")
    assert "nothing left to train" in again.out
    assert again.metrics[-1]["weights_sha256"] == result.metrics[-1]["weights_sha256"]


@slow
def test_break_on_one_rank(kit):
    kit.edit(
        "ddp_spawn.py", RECORD, f"{RECORD}            if rank == 1 and run.step_count == 20:\n                break\n"
    )
    line = refused(kit, SPAWN, "--timeout", "10", status=1)
    assert line.startswith("rank 1 left the loop over the batches in step 7/14 of epoch 2, and others did not")


def test_evaluation_and_log_in_the_midst_of_an_epoch(kit):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kit.edit(
        "ddp_spawn.py", "                    torch.nn.utils.clip", "                    norm = torch.nn.utils.clip"
    )
    kit.edit(
        "ddp_spawn.py",
        ZERO,
        f"{ZERO}                run.log(norm=norm, words='so')\n"
        "                if run.step_count == 9:\n                    run.evaluate(test_set, 'early')\n",
    )
    result = run(kit, SPAWN, "--epochs", "1", "--clip", "9", "--log-every", "5", "--tensorboard", "board", *SNAPSHOT)
    logs = [line for line in result.metrics if line["event"] == "log"]
    assert [line["step"] for line in logs] == [5, 10] and all(line["norm"] > 0 for line in logs)
    start, early = result.metrics[0], next(line for line in result.metrics if line["event"] == "eval")
    assert (start["event"], start["clip"], start["world_size"], start["torch"]) == ("start", 9.0, 2, torch.__version__)
    assert (early["set"], early["step"], early["total"]) == ("early", 10, 359)
    assert "step 10: early accuracy 0." in result.out
    board = EventAccumulator(str(kit.path / "board"))
    board.Reload()
    assert [event.step for event in board.Scalars("norm")] == [5, 10]
    assert {"loss", "lr", "early/accuracy", "test/loss"} <= set(board.Tags()["scalars"])


@slow
def test_names_that_clash_in_the_log(kit):
    """A score with the name of a value that the event has itself, and numbers that JSON does not have."""
    kit.edit(
        "common/job.py", SCORE, "    return {'step': len(labels), 'none': float('nan') * losses, 'loss': losses}\n"
    )
    result = run(kit, PARALLEL, "--steps", "2")
    *_, evaluated, end = result.metrics
    assert (evaluated["step"], evaluated["test_step"], evaluated["none"]) == (2, 1.0, "nan")
    assert (end["step"], end["test_step"]) == (2, 1.0) and end["test_loss"] == evaluated["loss"] != end["loss"]


# ------------------------------------------------------------------------------ random by sample, FSDP2, notebooks


RANDOM = """


class Crop(TensorDataset):
    def __getitem__(self, index):
        import random

        import numpy

        pixels, label = super().__getitem__(index)
        drawn = (random.random(), numpy.random.rand(), torch.rand(()).item())
        open("drawn", "a").write(f"{index} {drawn}\\n")
        return pixels + sum(drawn), label
"""


def test_random_by_sample(kit):
    """The same at every world size, with any workers, and after a resume."""
    kit.edit(
        "common/job.py",
        SETS,
        SETS.replace("return TensorDataset", "return RandomBySample(Crop", 1).replace("[~in_test])", "[~in_test]))", 1),
    )
    append(kit, RANDOM)
    kit.edit(
        "common/job.py",
        "from torch.utils.data import TensorDataset\n",
        "from torch.utils.data import TensorDataset\n\nfrom common.data import RandomBySample\n",
    )
    drawn = []
    for command, *options in [
        (ALONE,),
        ((*SPAWN, "--nprocs", "3"),),
        (ALONE, "--workers", "2"),
        (ALONE, "--steps", "17", *SNAPSHOT),
        (SPAWN, *SNAPSHOT),
    ]:
        run(kit, command, "--epochs", "2", *options)
        if "--steps" not in options:
            drawn.append(sorted((kit.path / "drawn").read_text().splitlines()))
            (kit.path / "drawn").unlink()
    assert len(drawn[0]) == 2 * 14 * 96 and len(set(drawn[0])) == len(drawn[0])
    assert drawn.count(drawn[0]) == 4


@pytest.mark.parametrize(
    "command", [PARALLEL, pytest.param(SPAWN, marks=slow), pytest.param(forked_ranks(3, "ddp_torchrun.py"), marks=slow)]
)
def test_random_data_in_loader_workers(kit, command):
    """Without `RandomBySample` too a resume in the middle of an epoch draws the same numbers."""
    kit.edit("common/job.py", SETS, SETS.replace("return TensorDataset", "return Crop", 1))
    append(kit, RANDOM.replace('        open("drawn", "a").write(f"{index} {drawn}\\n")\n', ""))
    run(kit, command, "--workers", "2", "--steps", "20", *SNAPSHOT)
    options = [("--workers", "2", *SNAPSHOT), ("--workers", "2"), ("--workers", "1")]
    assert len({run(kit, command, "--epochs", "3", *some).metrics[-1]["weights_sha256"] for some in options}) == 1


def test_loader_workers_see_what_the_script_changes(kit):
    """Such as the epoch, which a dataset may go by: workers that live on would have a copy of the first one."""
    kit.edit("common/job.py", SETS, SETS.replace("return TensorDataset", "return Harder", 1))
    append(
        kit,
        "\n\nclass Harder(TensorDataset):\n    epoch = 0\n\n    def __getitem__(self, index):\n"
        "        pixels, label = super().__getitem__(index)\n        return pixels / (1 + self.epoch), label\n",
    )
    kit.edit("dp_train.py", "    for _ in run.epochs():\n", "    for train_set.epoch in run.epochs():\n")
    digests = [run(kit, PARALLEL, "--epochs", "3", *more).metrics[-1] for more in ((), ("--workers", "2"))]
    assert digests[0]["weights_sha256"] == digests[1]["weights_sha256"]


def test_random_by_sample_leaves_the_accelerators_alone(monkeypatch):
    """What the model draws there, for dropout, must not follow the last sample that was loaded."""
    from common.data import RandomBySample

    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    data = RandomBySample([0] * 4)
    data.dataset = type("Drawn", (list,), {"__getitem__": lambda self, index: torch.rand(()).item()})(range(4))
    assert data[1] == data[1] != data[5] and not seeded
    assert torch.equal(before, torch.get_rng_state())


def test_random_by_sample_inside_another_wrapper(kit):
    kit.edit(
        "common/job.py",
        SETS,
        "    whole = RandomBySample(TensorDataset(pixels, labels))\n"
        "    return torch.utils.data.Subset(whole, range(1000)), whole\n",
    )
    kit.edit(
        "common/job.py",
        "from torch.utils.data import TensorDataset\n",
        "from torch.utils.data import TensorDataset\n\nfrom common.data import RandomBySample\n",
    )
    assert "RandomBySample lies inside a Subset: make it the outermost wrapper" in refused(kit, PARALLEL)


@pytest.mark.parametrize("nproc", [pytest.param(2, marks=slow), pytest.param(3, marks=slow)])
def test_fsdp2(kit, nproc):
    """`fully_shard(model)` in place of DDP(model): the same result, and exact resumes."""
    options = ("--precision", "fp64", "--accum", "2", "--clip", "1")
    run(kit, PARALLEL, "--epochs", "3", *options, "--snapshot", "plain.pt")
    script = (kit.path / "ddp_torchrun.py").read_text()
    start, end = script.index("    ddp = DDP("), script.index("    if args.compile")
    script = f"{script[:start]}    ddp = fully_shard(model)\n{script[end:]}"
    script = script.replace(
        "from torch.nn.parallel import DistributedDataParallel as DDP", "from torch.distributed.fsdp import fully_shard"
    )
    (kit.path / "ddp_torchrun.py").write_text(script)
    command = forked_ranks(nproc, "ddp_torchrun.py")
    goes_on_exactly(kit, command, *options)
    expected, found = states(kit, "plain.pt"), states(kit, "run.pt")
    for name, value in expected["model"].items():
        assert (value - found["model"][name]).abs().max() < 1e-9
    run(kit, command, "--epochs", "3", *options, "--snapshot", "other.pt", "--steps", "17")
    run(kit, forked_ranks(1, "ddp_torchrun.py"), "--epochs", "3", *options, "--snapshot", "other.pt")
    other = states(kit, "other.pt")
    for name, value in expected["model"].items():
        assert (value - other["model"][name]).abs().max() < 1e-9
    assert math.isclose(
        other["optimizer"]["state"][0]["momentum_buffer"].sum(),
        expected["optimizer"]["state"][0]["momentum_buffer"].sum(),
        abs_tol=1e-9,
    )


@pytest.mark.parametrize(
    "script", ["dp_train", *(pytest.param(script, marks=slow) for script in ("ddp_torchrun", "ddp_spawn"))]
)
def test_main_can_be_called_with_arguments(kit, script):
    """By a notebook or another program, twice in a row, also after a mistake."""
    (kit.path / "caller.py").write_text(
        f"import signal\n\nimport {script}\n\nif __name__ == '__main__':\n"
        "    before = signal.getsignal(signal.SIGINT)\n"
        f"    {script}.main(['--epochs', '1', '--precision', 'fp64', '--metrics', 'm', '--snapshot', 'a.pt'])\n"
        f"    try:\n        {script}.main(['--epochs', '0'])\n"
        "    except SystemExit as end:\n        print('status', end.code)\n"
        f"    {script}.main(['--epochs', '1', '--metrics', 'm', '--snapshot', 'b.pt'])\n"
        "    print('handlers', signal.getsignal(signal.SIGINT) is before)\n"
    )
    result = kit.run(*forked("caller.py"))
    assert result.status == 0 and "status 2" in result.out and "handlers True" in result.out, result
    one, two = kit.metrics("m", "end")
    assert one["step"] == two["step"] == 14 and one["weights_sha256"] != two["weights_sha256"]
    assert states(kit, "a.pt")["model"]["net1.weight"].dtype == torch.float64
    assert states(kit, "b.pt")["model"]["net1.weight"].dtype == torch.float32
    assert all(json.loads(line) for line in (kit.path / "m").read_text().splitlines())


@pytest.mark.parametrize(
    "nproc, accum, clip, precision",
    [
        (2, 2, 1, "fp32"),
        *(pytest.param(nproc, 1, 0, "fp32", marks=slow) for nproc in (1, 2, 3)),
        *(pytest.param(nproc, 2, 1, "fp16", marks=slow) for nproc in (1, 3)),
    ],
)
def test_flat_loop_is_the_nested_one(kit, nproc, accum, clip, precision):
    """Bit for bit the weights of DDP by hand."""
    shutil.copy(Path(__file__).with_name("nested_ddp.py"), kit.path)
    plain = kit.run(*forked_ranks(nproc, "nested_ddp.py", "digest", accum, clip, precision))
    assert plain.status == 0, plain
    options = ["--epochs", "3", "--accum", accum, "--precision", precision, *(["--clip", clip] if clip else [])]
    found = run(kit, forked_ranks(nproc, "ddp_torchrun.py"), "--threads", "1", *options).metrics[-1]
    assert found["weights_sha256"] == (kit.path / "digest").read_text()

"""A mistake of the user's: one `error:` line, status 2, nothing written, nothing started."""

import os
import re
from importlib.util import find_spec

import pytest
from harness import PYTHON, files, forked, torchrun

SCRIPTS = ("dp_train.py", "ddp_spawn.py", "ddp_torchrun.py", "model_parallel_ddp.py")

# what is typed after the script: what the line says
IN_EVERY_SCRIPT = {
    "--epochs 0": "argument --epochs: 0 is not from 1 to 4294967296",
    "--batch-size -96": "argument --batch-size: ",
    "--lr nan": "argument --lr: nan is not from 1e-12 to ",
    "--precision fp8": "argument --precision: invalid choice: 'fp8'",
    "--device tpu": "--device tpu: this torch finds cpu here",
    "--accum 7": "--batch-size 96 does not divide into",
    "--batch-size 1440": "--batch-size 1440 is more than the 1438 samples",
    "--metrics nowhere/m.jsonl": "--metrics nowhere/m.jsonl: No such file or directory",
    "--metrics data": "--metrics data: Is a directory",
    "--metrics README.md": "--metrics README.md: there is a file of another kind, which",
    "--metrics x --snapshot ./x": "give each its own path",
    "--metrics x.prev --snapshot x": "give each its own path",
    "--snapshot data": "--snapshot data is a directory, a link or a device: give the path of a file",
    "--snapshot README.md/x": "--snapshot README.md/x: cannot write there: Not a directory",
    "--tensorboard README.md": "README.md: File exists" if find_spec("tensorboard") else "--tensorboard README.md: ",
    "--timeout 0.5": "argument --timeout: 0.5 is not from 1 to 1000000",
    "--threads 9999": "argument --threads: 9999 is not from 1 to 1024",
    "--seed 1e3": "argument --seed: invalid int value: '1e3'",
    "--epochs 99999999999999999999": "argument --epochs: ",
    "--no-such-option": "unrecognized arguments: --no-such-option",
}
IN_ONE = {
    "dp_train.py --device-ids 0,1": "--device-ids [0, 1], --output-device None: take none: cpu has no indices",
    "dp_train.py --device-ids one": "argument --device-ids: invalid indices value: 'one'",
    "dp_train.py --output-device 1": "--device-ids [], --output-device 1: take none: cpu has no indices",
    "ddp_spawn.py --nprocs 5": "does not divide into 5 processes × 1 micro-batches: the nearest that does is 95 or 100",
    "ddp_spawn.py --nprocs 4 --batch-size 3": "the nearest that does is 4",
    "ddp_spawn.py --backend mpi": "--backend mpi: this torch has gloo",
    "ddp_torchrun.py --backend telegraph": "--backend telegraph: this torch has gloo",
    "model_parallel_ddp.py --backend nccl": "--backend nccl",
    "ddp_torchrun.py --init-method tcp://nowhere": "is none of env://, tcp://HOST:PORT, file:///PATH",
    "ddp_torchrun.py --init-method file://relative": "is none of env://, tcp://HOST:PORT, file:///PATH",
}


def check(kit, command, expected, env=None):
    before = sorted(path for path in kit.path.rglob("*") if "__pycache__" not in path.parts)
    result = kit.run(*command, env=env)
    assert result.status == 2, result.err
    assert len(result.err.splitlines()) == 1 and expected in result.errors[0], result.err
    assert before == sorted(path for path in kit.path.rglob("*") if "__pycache__" not in path.parts)


def test_mistake_as_a_user_makes_it(kit):
    check(kit, ["python", "ddp_spawn.py", "--epochs", "0"], IN_EVERY_SCRIPT["--epochs 0"])


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(one, marks=() if one in ("ddp_spawn.py", "ddp_torchrun.py") else pytest.mark.slow)
        for one in SCRIPTS
    ],
)
def test_mistake_that_each_script_tells(kit, script):
    before = files(kit.path)
    for options, words in IN_EVERY_SCRIPT.items():
        check(kit, forked(script, *options.split()), words)
    assert files(kit.path) == before


def test_compile_without_a_compiler(kit):
    for script in SCRIPTS:
        check(kit, forked(script, "--compile"), "error: --compile needs a C++ compiler", {"PATH": "/nowhere"})


def test_shell_script_without_torch(kit):
    python3 = kit.path / "bin" / "python3"
    python3.parent.mkdir()
    python3.write_text(f'#!/bin/sh\nexec {PYTHON} -S "$@"\n')  # without what is installed
    python3.chmod(0o755)
    command = ("./ddp_multinode.sh", "--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1")
    check(kit, command, "has no torch: activate the environment", {"PATH": f"{python3.parent}:{os.environ['PATH']}"})


@pytest.mark.parametrize(
    "code, words",
    [
        ("torch.__version__ = '2.5.1'", "torch 2.5.1 is too old"),
        ("torch.distributed.is_available = lambda: False", "was built without torch.distributed"),
    ],
)
def test_torch_that_does_not_suffice(kit, code, words):
    kit.first(f"import torch\n{code}")
    for script in SCRIPTS:
        check(kit, forked("first.py", script), words)


def test_variables_of_others_are_left_alone(kit):
    """ddp_spawn.py needs no port."""
    result = kit.run(*forked("ddp_spawn.py", "--epochs", "1"), env={"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"})
    assert result.status == 0


@pytest.mark.parametrize("command", IN_ONE)
def test_mistake(kit, command):
    check(kit, forked(*command.split()), IN_ONE[command])


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--batch-size 1440", "--epochs 0"])
def test_mistake_under_torchrun_is_told_once(kit, options):
    result = kit.run(*torchrun(2, "ddp_torchrun.py", *options.split()))
    assert result.status != 0
    assert len(result.errors) == 1, result.err
    assert re.search(r"exitcode +: 2 ", result.err), "torchrun's summary gives the status"
    assert "UserError" not in result.err


UNDER_TORCHRUN = {
    "dp_train.py": "dp_train.py was started by torchrun: start it by `python dp_train.py`",
    "ddp_spawn.py": "ddp_spawn.py was started by torchrun: start it by `python ddp_spawn.py`",
    "model_parallel_ddp.py --nprocs 2": "--nprocs 2: torchrun has started the processes",
}


@pytest.mark.parametrize("command", UNDER_TORCHRUN)
def test_script_that_no_launcher_starts(kit, command):
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    check(kit, forked(*command.split()), UNDER_TORCHRUN[command], env)


@pytest.mark.slow
@pytest.mark.parametrize("command", UNDER_TORCHRUN)
def test_script_that_torchrun_starts(kit, command):
    result = kit.run(*torchrun(2, *command.split()), timeout=60)
    assert result.status != 0 and len(result.errors) == 1 and UNDER_TORCHRUN[command] in result.errors[0], result
    assert "epoch" not in result.out


@pytest.mark.parametrize(
    "env, expected",
    [
        ({"RANK": "0"}, "the environment has RANK but lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "has MASTER_ADDR, MASTER_PORT but lacks RANK, WORLD_SIZE"),
        (
            {"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "the environment's RANK is 'one', not a number",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"},
            "the environment's MASTER_PORT is 70000, not from 1 to 65535",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "rank is 2 but must be from 0 to 1",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "local world size is 3 but must be from 0 to 2",
        ),
    ],
    ids=["missing", "only-master", "no-number", "port", "too-high", "local-world-size"],
)
@pytest.mark.parametrize("script", ["ddp_torchrun.py", "model_parallel_ddp.py"])
def test_environment(kit, script, env, expected):
    check(kit, forked(script), expected, env)


@pytest.mark.parametrize("options", ["48, shuffle=True", "48 + 4 * rank, sampler=loader.sampler"])
def test_loader_of_ones_own(kit, options):
    """On the sampler or not, on one rank or all."""
    loader = f"    loader = torch.utils.data.DataLoader(train_set, {options})\n"
    kit.edit("ddp_spawn.py", "    # 4. Training: ", f"{loader}    # 4. Training: ")
    result = kit.run(*forked("ddp_spawn.py"))
    assert result.status == 2 and len(result.err.splitlines()) == 1, result
    assert result.errors[0].startswith("error: Run: the loader is not train_loader's, "), result

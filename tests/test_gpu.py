"""What needs a GPU, or two."""

import pytest
import torch
from harness import torchrun

gpu = pytest.mark.gpu
GPUS = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, torch finds {GPUS}")
METRICS = ("--metrics", "metrics.jsonl")

ONE_GPU = {
    "dp_train": ("python", "dp_train.py", "--device-ids", "0"),
    "ddp_spawn": ("python", "ddp_spawn.py", "--nprocs", "1"),
    "ddp_torchrun": torchrun(1, "ddp_torchrun.py"),
    "model_parallel_ddp": ("python", "model_parallel_ddp.py", "--nprocs", "1"),
}
TWO_GPUS = {
    "dp_train": ("python", "dp_train.py", "--device-ids", "0,1"),
    "ddp_spawn": ("python", "ddp_spawn.py", "--nprocs", "2"),
    "ddp_torchrun": torchrun(2, "ddp_torchrun.py"),
}


def end_of(kit, command, *options):
    result = kit.run(*command, *METRICS, *options, timeout=300)
    assert result.status == 0, result.err
    return kit.metrics(event="end")[-1], result


@gpu
@pytest.mark.parametrize("options", ["", "--precision bf16", "--precision fp16", "--compile"])
@pytest.mark.parametrize("command", ONE_GPU.values(), ids=ONE_GPU)
def test_one_gpu(kit, command, options):
    end, _ = end_of(kit, command, *options.split())
    assert end["accuracy"] >= 0.97


@gpu
@pytest.mark.parametrize("command", ONE_GPU.values(), ids=ONE_GPU)
def test_one_gpu_agrees_with_the_cpu(kit, command):
    options = ("--precision", "fp64", "--epochs", "2", *METRICS)
    assert kit.run(*command, *options).status == 0
    assert kit.run("python", "ddp_torchrun.py", "--device", "cpu", *options).status == 0
    losses = [line["loss"] for line in kit.metrics(event="step")]
    assert losses[:28] == pytest.approx(losses[28:], abs=1e-9)


@gpu
@pytest.mark.parametrize("script", ["ddp_spawn.py", "model_parallel_ddp.py"])
def test_more_processes_than_gpus(kit, script):
    result = kit.run("python", script, "--nprocs", GPUS + 1)
    assert result.status == 2
    assert len(result.errors) == 1 and f"{GPUS + 1} processes with" in result.errors[0]
    result = kit.run(*torchrun(GPUS + 1, "ddp_torchrun.py"))
    assert len(result.errors) == 1 and f"this machine shows {GPUS}" in result.errors[0]


@gpu
@two_gpus
@pytest.mark.parametrize("options", ["", "--precision bf16"])
@pytest.mark.parametrize("command", TWO_GPUS.values(), ids=TWO_GPUS)
def test_two_gpus(kit, command, options):
    end, result = end_of(kit, command, *options.split())
    assert end["accuracy"] >= 0.97
    memory = result.out.splitlines()[-1].partition("peak memory per device ")[2].removesuffix(" MiB").split(" to ")
    assert len(memory) == 2 and all(float(mib) > 0 for mib in memory)


@gpu
@two_gpus
def test_data_parallel_keeps_the_dtype_of_autocast(kit):
    kit.edit("common/job.py", "self.net2(self.relu(", "show(self.net2)(self.relu(")
    with (kit.path / "common" / "job.py").open("a") as file:
        file.write(
            "\n\ndef show(layer):\n"
            "    def forward(hidden):\n"
            "        outputs = layer(hidden)\n        print(outputs.dtype)\n        return outputs\n\n"
            "    return forward\n"
        )
    _, result = end_of(kit, TWO_GPUS["dp_train"], "--precision", "bf16", "--steps", "2")
    assert "torch.bfloat16" in result.out and "torch.float16" not in result.out


@gpu
@two_gpus
def test_pairs_of_gpus(kit):
    result = kit.run("python", "model_parallel_ddp.py", "--epochs", "2", *METRICS)
    assert result.status == 0, result.err
    assert kit.metrics(event="end")[0]["world_size"] == GPUS // 2
    assert ("left over" in result.out) == (GPUS % 2 == 1)

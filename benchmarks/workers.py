"""Runs a function of a benchmark in fresh processes, and returns what rank 0's returned."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent


def run_ranks(module, function, *words, ranks=2):
    """Call `function(*words)` of the module in a gloo group of `ranks` processes of one thread; it returns JSON."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        command = [sys.executable, "-m", "benchmarks.workers", module, function, directory, *map(str, words)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        processes = [
            subprocess.Popen(command, cwd=ROOT, env=environment | {"RANK": str(rank)}) for rank in range(ranks)
        ]
        statuses = [process.wait(timeout=1200) for process in processes]
        if any(statuses):
            raise RuntimeError(f"{' '.join(command)} ended with {statuses}")
        return json.loads(Path(directory, "result").read_text())


def main():
    module, function, directory, *words = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=world_size)
    result = getattr(importlib.import_module(module), function)(*words)
    if rank == 0:
        Path(directory, "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

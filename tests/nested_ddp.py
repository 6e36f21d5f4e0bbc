"""The toy job in DDP by hand: nested loops, and nothing of `common` but the job and the order of the gradients.

The flat loop takes its steps bit for bit.

torchrun --nproc_per_node=2 nested_ddp.py WEIGHTS ACCUM CLIP PRECISION --init-method URL
"""

import contextlib
import gc
import hashlib
import os
import sys

from common import job
from common.loop import arrange_gradients

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which it would keep alive
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, BATCH = 3, 96


class Options:
    lr = 0.2


def main():
    digest_file, accum, clip, precision = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=sys.argv[-1], rank=rank, world_size=world_size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train_set, _ = job.load_data()
    sampler = DistributedSampler(train_set, drop_last=True, seed=0)
    loader = DataLoader(train_set, BATCH // dist.get_world_size() // accum, sampler=sampler)
    model = job.ToyModel()
    ddp = DDP(model, gradient_as_bucket_view=True)
    if dist.get_world_size() > 2:
        arrange_gradients(ddp)
    optimizer, schedule = job.make_optimizer(model, Options, 42)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(train_set) // BATCH):
            for left in reversed(range(accum)):
                inputs, labels = next(batches)
                with ddp.no_sync() if left else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
                        loss = job.loss(ddp(inputs), labels)
                    scaler.scale(loss / accum).backward()
            scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        with open(digest_file, "w") as file:  # noqa: PTH123 - as plain as can be
            file.write(digest.hexdigest())
    # Let go in the kit's order: the interpreter's end with DDP alive aborts now and then.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    del ddp
    gc.collect()
    del backend


if __name__ == "__main__":
    main()

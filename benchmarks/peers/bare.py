"""The yardstick: DistributedDataParallel by hand, with torch alone and no feature.

torchrun --nproc_per_node=2 bare.py, or python bare.py for mp.spawn.
"""

import os
import tempfile

from common import job

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def train(rank, world_size, init_method="env://"):
    dist.init_process_group("gloo", init_method, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    train_set, test_set = job.load_data()
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, job.BATCH // world_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, job.BATCH // world_size, sampler=DistributedSampler(test_set, shuffle=False))
    model = DDP(job.ToyModel(), gradient_as_bucket_view=True)  # as in the kit
    optimizer, schedule = job.make_optimizer(model)
    for epoch in range(job.EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            job.loss(model(inputs), labels).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            sums = torch.zeros(3)
            for inputs, labels in test_loader:
                scores = job.score(model.module(inputs), labels)
                sums += torch.stack([scores["accuracy"], scores["loss"], torch.tensor(len(labels))])
        model.train()
        dist.all_reduce(sums)
        if rank == 0:
            accuracy, loss = sums[:2] / sums[2]
            print(f"epoch {epoch}: accuracy {accuracy:.2%}, loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


def spawned(rank, world_size, directory):
    train(rank, world_size, f"file://{directory}/store")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(spawned, (2, directory), nprocs=2)

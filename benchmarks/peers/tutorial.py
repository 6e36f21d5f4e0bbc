"""The shape of PyTorch's DDP tutorial series, written anew, with a loss that has something to learn.

A trainer class with a method for the batch and one for the epoch, which looks at a batch first for its size.
https://docs.pytorch.org/tutorials/beginner/ddp_series_intro.html
"""

import os

from common import job

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, schedule):
        self.rank, self.loader, self.optimizer, self.schedule = int(os.environ["RANK"]), loader, optimizer, schedule
        self.model = DDP(model)

    def batch(self, inputs, labels):
        self.optimizer.zero_grad()
        loss = job.loss(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def epoch(self, epoch):
        size = len(next(iter(self.loader))[0])
        print(f"rank {self.rank}, epoch {epoch}: batches of {size}, steps: {len(self.loader)}", flush=True)
        self.loader.sampler.set_epoch(epoch)
        for inputs, labels in self.loader:
            self.batch(inputs, labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, _ = job.load_data()
    batch = job.BATCH // dist.get_world_size()
    loader = DataLoader(train_set, batch, pin_memory=False, shuffle=False, sampler=DistributedSampler(train_set))
    model = job.ToyModel()
    trainer = Trainer(model, loader, *job.make_optimizer(model))
    for epoch in range(job.EPOCHS):
        trainer.epoch(epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

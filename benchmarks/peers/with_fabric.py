"""The job by Lightning Fabric, as its documentation has it: https://lightning.ai/docs/fabric/stable/"""

import os

from common import job

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader


def main():
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
    fabric.launch()
    torch.manual_seed(0)
    train_set, _ = job.load_data()
    loader = DataLoader(train_set, job.BATCH // fabric.world_size, shuffle=True, drop_last=True)
    model = job.ToyModel()
    optimizer, schedule = job.make_optimizer(model)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(job.EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = job.loss(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
            schedule.step()


if __name__ == "__main__":
    main()

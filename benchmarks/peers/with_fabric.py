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
    train_set, test_set = job.load_data()
    loader = DataLoader(train_set, job.BATCH // fabric.world_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, job.BATCH // fabric.world_size)
    model = job.ToyModel()
    optimizer, schedule = job.make_optimizer(model)
    model, optimizer = fabric.setup(model, optimizer)
    loader, test_loader = fabric.setup_dataloaders(loader, test_loader)
    for _ in range(job.EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = job.loss(model(inputs), labels)
            fabric.backward(loss)
            optimizer.step()
            schedule.step()
        model.eval()
        sums = torch.zeros(3)
        with torch.no_grad():
            for inputs, labels in test_loader:
                scores = job.score(model(inputs), labels)
                sums += torch.stack([scores["accuracy"], scores["loss"], torch.tensor(len(labels))])
        model.train()
        sums = fabric.all_reduce(sums, reduce_op="sum")
        if fabric.is_global_zero:
            print(f"accuracy {sums[0] / sums[2]:.2%}, loss {sums[1] / sums[2]:.4f}")


if __name__ == "__main__":
    main()

"""The job by Accelerate, as its quick tour has it: https://huggingface.co/docs/accelerate/quicktour"""

from common import job

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    train_set, _ = job.load_data()
    loader = DataLoader(train_set, job.BATCH // accelerator.num_processes, shuffle=True, drop_last=True)
    model = job.ToyModel()
    optimizer, schedule = job.make_optimizer(model)
    # Not the schedule: a prepared one takes as many steps at a time as there are processes.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(job.EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = job.loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()

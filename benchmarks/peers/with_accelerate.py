"""The job by Accelerate, as its quick tour has it: https://huggingface.co/docs/accelerate/quicktour"""

from common import job

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    train_set, test_set = job.load_data()
    loader = DataLoader(train_set, job.BATCH // accelerator.num_processes, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, job.BATCH // accelerator.num_processes)
    model = job.ToyModel()
    optimizer, schedule = job.make_optimizer(model)
    # Not the schedule: a prepared one takes as many steps at a time as there are processes.
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
    for _ in range(job.EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = job.loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
        model.eval()
        right, losses, count = 0, 0.0, 0
        with torch.no_grad():
            for inputs, labels in test_loader:
                outputs, labels = accelerator.gather_for_metrics((model(inputs), labels))
                scores = job.score(outputs, labels)
                right, losses, count = right + scores["accuracy"], losses + scores["loss"], count + len(labels)
        model.train()
        accelerator.print(f"accuracy {right / count:.2%}, loss {losses / count:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""One machine, one process per device: DistributedDataParallel, started by torch.multiprocessing.spawn.

When:  one machine, and plain `python` should start it.
Not:   on several machines or under a scheduler; see ddp_torchrun.py.

    python ddp_spawn.py                             # a process per accelerator, or two on the CPU
    python ddp_spawn.py --nprocs 4 --device cpu
    python ddp_spawn.py --backend nccl --precision bf16
"""

import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from common import group, job, launch
from common.launch import one_line_errors
from common.run import Arguments, ResumableSampler, Run, autocast, check_batch, loader_options


@one_line_errors
def train(rank, world_size, directory, args):
    # 1. The process group: it meets in a file, so that no port is opened for it.
    ranks = launch.spawned(rank, world_size)
    device = group.local_devices(args, ranks)[0]
    group.setup(args, ranks, [device], f"file://{directory}/store")
    torch.manual_seed(args.seed)

    # 2. Data: each process loads its share of every global batch.
    train_set, test_set = job.load_data()
    sampler = ResumableSampler(len(train_set), args)
    loader = DataLoader(train_set, sampler.micro_batch, sampler=sampler, **loader_options(args, device))

    # 3. Model: the same weights everywhere, whose gradients DDP averages.
    model = DDP(
        job.ToyModel().to(device),
        device_ids=[device.index] if device.index is not None else None,
        gradient_as_bucket_view=True,  # spares a copy of all gradients
    )
    if args.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    # 4. Training.
    run = Run(args, model, optimizer, sampler, device)
    for _ in run.epochs():
        for micro_batches in run.steps(loader):
            optimizer.zero_grad()
            for inputs, labels in micro_batches:
                inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                with autocast(args):
                    loss = job.loss(model(inputs), labels)
                run.backward(loss)
            run.step()
        run.evaluate(test_set, job.score)
    group.cleanup()
    launch.report_finished(directory, rank)


@one_line_errors
def main():
    launch.refuse_launcher("ddp_spawn.py")
    args = Arguments(__doc__, ddp=True, nprocs=True).parse_args()
    nprocs = group.default_processes(args)
    check_batch(args, nprocs)
    with launch.spawning(args) as directory:
        context = mp.spawn(train, (nprocs, directory, args), nprocs, join=False)
        launch.wait_for_ranks(context, directory)


if __name__ == "__main__":
    main()

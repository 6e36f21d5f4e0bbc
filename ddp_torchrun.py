"""Any launcher that sets the environment, on one machine or many: DistributedDataParallel.

When:  torchrun, torch.distributed.launch, srun or mpirun starts the processes; the first choice for most training.
Not:   for a model that does not fit on one device: model_parallel_ddp.py, or FSDP2 where two do not suffice.

    python ddp_torchrun.py                                              # one process
    torchrun --nproc_per_node=4 ddp_torchrun.py                         # four processes on this machine
    python -m torch.distributed.launch --nproc_per_node=4 ddp_torchrun.py
    srun --ntasks-per-node=4 --gpus-per-task=1 python ddp_torchrun.py
    mpirun -np 4 python ddp_torchrun.py
    torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --master_port=29500 --nproc_per_node=4 ddp_torchrun.py
"""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from common import group, job, launch
from common.launch import one_line_errors
from common.run import Arguments, ResumableSampler, Run, autocast, check_batch, loader_options


@one_line_errors
def main():
    # 1. The process group: ranks, world size and where to meet come from the environment.
    args = Arguments(__doc__, ddp=True, launched=True).parse_args()
    ranks = launch.ranks_from_environment(args)
    check_batch(args, ranks.world_size)
    device = group.local_devices(args, ranks)[0]
    group.setup(args, ranks, [device], args.init_method)
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


if __name__ == "__main__":
    main()

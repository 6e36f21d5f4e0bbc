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

from common import job
from common.data import check_sets, move, train_loader
from common.errors import entry
from common.group import join
from common.options import Options
from common.run import Run

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


@entry
def main(argv=None):
    # 1. The process group: ranks, world size and where to meet come from the environment.
    args = Options(__doc__, ddp=True, launched=True).parse_args(argv)
    device = join(args)

    # 2. Data: each process loads its share of every global batch.
    train_set, test_set = check_sets(*job.load_data())
    loader = train_loader(train_set, args, device, job.collate)

    # 3. Model: the same weights everywhere, whose gradients DDP averages.
    model = job.ToyModel().to(device)
    ddp = DDP(
        model,
        device_ids=[device.index] if device.index is not None else None,
        gradient_as_bucket_view=True,  # spares a copy of all gradients
    )
    if args.compile:
        ddp.compile()
    optimizer, schedule = job.make_optimizer(model, args, loader.sampler.total_steps)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")

    # 4. Training: what is named in Run is saved, and goes on with it.
    run = Run(args, loader, ddp, model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)
    for _ in run.epochs():
        for inputs, labels in run.batches():
            inputs, labels = move(inputs, device), move(labels, device)
            with torch.autocast(args.device, args.dtype, enabled=args.dtype is not None):
                loss = job.loss(ddp(inputs), labels)
            scaler.scale(loss / args.accum).backward()
            run.record(loss)
            if run.step_due:  # after --accum micro-batches; until then the ranks do not communicate
                scaler.unscale_(optimizer)
                if args.clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
        run.evaluate(test_set)


if __name__ == "__main__":
    main()

"""One machine, one process per device: DistributedDataParallel, started by torch.multiprocessing.spawn.

When:  one machine, and plain `python` should start it.
Not:   on several machines or under a scheduler; see ddp_torchrun.py.

    python ddp_spawn.py                             # a process per accelerator, or two on the CPU
    python ddp_spawn.py --nprocs 4 --device cpu
    python ddp_spawn.py --backend nccl --precision bf16
"""

from common import job
from common.data import check_sets, move, train_loader
from common.errors import entry
from common.group import join
from common.options import Options
from common.run import Run
from common.spawn import spawned, spawning, wait_for_ranks

import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


@entry
def train(rank, args, path):
    # 1. The process group: it meets in a file, so that no port is opened for it.
    device = join(args, spawned(rank, args.nprocs, path))

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


@entry
def main(argv=None):
    args = Options(__doc__, ddp=True, nprocs=True).parse_args(argv)
    with spawning(args) as path:
        context = mp.spawn(train, (args, path), args.nprocs, join=False)
        wait_for_ranks(context, path)


if __name__ == "__main__":
    main()

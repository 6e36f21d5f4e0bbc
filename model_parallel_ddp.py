"""A model split over two devices, and replicated by DDP on every further pair of devices.

When:  the model does not fit on one device but on two.
Not:   when it fits on one: while one half computes, the other waits. For more than two devices see FSDP2 or pipelining.

    python model_parallel_ddp.py                    # a process per pair of accelerators, or two on the CPU
    python model_parallel_ddp.py --nprocs 2
    torchrun --nproc_per_node=4 model_parallel_ddp.py
"""

from common import job
from common.data import check_sets, move, train_loader
from common.errors import entry
from common.group import join
from common.launchers import ranks_from_environment
from common.options import Options
from common.run import Run
from common.spawn import spawned, spawning, wait_for_ranks

import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def train(args, ranks):
    # 1. The process group: local rank r has devices 2r and 2r + 1, so that no device is shared.
    dev0, dev1 = join(args, ranks, each=2)

    # 2. Data: each process loads its share of every global batch.
    train_set, test_set = check_sets(*job.load_data())
    loader = train_loader(train_set, args, dev1, job.collate)

    # 3. Model: no device_ids, since each replica is on two.
    model = job.ToyMpModel(dev0, dev1)
    ddp = DDP(model, gradient_as_bucket_view=True)  # spares a copy of all gradients
    if args.compile:
        ddp.compile()
    optimizer, schedule = job.make_optimizer(model, args, loader.sampler.total_steps)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")

    # 4. Training: the inputs enter on dev0, the outputs come out on dev1.
    run = Run(args, loader, ddp, model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)
    for _ in run.epochs():
        for inputs, labels in run.batches():
            inputs, labels = move(inputs, dev0), move(labels, dev1)
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
def spawned_train(rank, args, path):
    train(args, spawned(rank, args.nprocs, path))


@entry
def main(argv=None):
    args = Options(__doc__, ddp=True, nprocs=True, launched=True).parse_args(argv)
    ranks = ranks_from_environment(args)
    if ranks.launcher:
        train(args, ranks)
    else:
        with spawning(args, each=2) as path:
            context = mp.spawn(spawned_train, (args, path), args.nprocs, join=False)
            wait_for_ranks(context, path)


if __name__ == "__main__":
    main()

"""A model split over two devices, and replicated by DDP on every further pair of devices.

When:  the model does not fit on one device but on two.
Not:   when it fits on one: while one half computes, the other waits. For more than two devices see FSDP2 or pipelining.

    python model_parallel_ddp.py                    # a process per pair of accelerators, or two on the CPU
    python model_parallel_ddp.py --nprocs 2
    torchrun --nproc_per_node=4 model_parallel_ddp.py
"""

import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from common import group, job, launch
from common.launch import UserError, one_line_errors
from common.run import Arguments, ResumableSampler, Run, autocast, check_batch, loader_options


def train(args, ranks, init_method):
    # 1. The process group: local rank r has devices 2r and 2r + 1, so that no device is shared.
    dev0, dev1 = group.local_devices(args, ranks, each=2)
    group.setup(args, ranks, [dev0, dev1], init_method)
    spare = 0 if args.device == "cpu" else torch.accelerator.device_count() - 2 * ranks.local_world_size
    if spare > 0:
        group.say(f"{spare} of the devices here left over: two for each process")
    if spare < 0:
        group.say(f"one device here: both halves of the model are on {dev0}")
    torch.manual_seed(args.seed)

    # 2. Data: each process loads its share of every global batch.
    train_set, test_set = job.load_data()
    sampler = ResumableSampler(len(train_set), args)
    loader = DataLoader(train_set, sampler.micro_batch, sampler=sampler, **loader_options(args, dev1))

    # 3. Model: no device_ids, since each replica is on two.
    model = DDP(job.ToyMpModel(dev0, dev1), gradient_as_bucket_view=True)  # spares a copy of all gradients
    if args.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    # 4. Training: the inputs enter on dev0, the outputs come out on dev1.
    run = Run(args, model, optimizer, sampler, dev1)
    for _ in run.epochs():
        for micro_batches in run.steps(loader):
            optimizer.zero_grad()
            for inputs, labels in micro_batches:
                inputs, labels = inputs.to(dev0, non_blocking=True), labels.to(dev1, non_blocking=True)
                with autocast(args):
                    loss = job.loss(model(inputs), labels)
                run.backward(loss)
            run.step()
        run.evaluate(test_set, job.score)
    group.cleanup()


@one_line_errors
def spawned_train(rank, world_size, directory, args):
    train(args, launch.spawned(rank, world_size), f"file://{directory}/store")
    launch.report_finished(directory, rank)


@one_line_errors
def main():
    args = Arguments(__doc__, ddp=True, nprocs=True, launched=True).parse_args()
    ranks = launch.ranks_from_environment(args)
    if ranks.launcher:
        if args.nprocs:
            raise UserError(f"--nprocs {args.nprocs}: {ranks.launcher} has started the processes, leave it out")
        check_batch(args, ranks.world_size)
        train(args, ranks, args.init_method)
    else:
        nprocs = group.default_processes(args, each=2)
        check_batch(args, nprocs)
        with launch.spawning(args) as directory:
            context = mp.spawn(spawned_train, (nprocs, directory, args), nprocs, join=False)
            launch.wait_for_ranks(context, directory)


if __name__ == "__main__":
    main()

"""One process, many GPUs: nn.DataParallel.

When:  a script of one process should use all GPUs of its machine after a change of one line.
Not:   for speed. Every step copies the model to each GPU and gathers all outputs on one of them, driven by threads of a
       single Python process, and that GPU carries most of the memory. DDP does neither: ddp_spawn.py, ddp_torchrun.py.

    python dp_train.py                              # all accelerators, or the CPU
    python dp_train.py --device-ids 0,1 --output-device 1
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from common import group, job, launch
from common.launch import UserError, one_line_errors
from common.run import Arguments, ResumableSampler, Run, autocast, check_batch, loader_options


class DataParallel(nn.DataParallel):
    """nn.DataParallel, whose threads autocast to the dtype of the caller; torch's use the default, fp16 for bf16."""

    def parallel_apply(self, replicas, inputs, kwargs):
        kind = self.src_device_obj.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        for replica in replicas:
            replica.forward = torch.autocast(kind, dtype, enabled)(replica.forward)
        return super().parallel_apply(replicas, inputs, kwargs)


def choose_devices(args):
    """(device ids, output device); no ids on a CPU. Raises `UserError` where they are not there."""
    visible = 0 if args.device == "cpu" else torch.accelerator.device_count()
    try:
        ids = list(map(int, args.device_ids.split(","))) if args.device_ids else list(range(visible))
    except ValueError:
        raise UserError(f"--device-ids {args.device_ids}: give numbers, as in 0,1") from None
    output = args.output_device if args.output_device is not None else (ids or [None])[0]
    if len(set(ids)) < len(ids) or not set(ids) <= set(range(visible)) or output not in (ids or [None]):
        raise UserError(
            f"device ids {ids} with output device {output}: give each of the {visible} {args.device} devices that "
            "torch sees here at most once, and one of them as output device"
        )
    return ids, torch.device(args.device, output)


@one_line_errors
def main():
    # 1. No process group: this process drives all devices.
    launch.refuse_launcher("dp_train.py")
    parser = Arguments(__doc__)
    parser.add_argument("--device-ids", metavar="I,J,…", help="devices to use; default: all")
    parser.add_argument("--output-device", type=int, metavar="I", help="device of the outputs; default: the first")
    args = parser.parse_args()
    check_batch(args, world_size=1)
    device_ids, device = choose_devices(args)
    group.prepare(args, launch.Ranks(), device)
    torch.manual_seed(args.seed)

    # 2. Data: one loader for whole batches, which DataParallel splits.
    train_set, test_set = job.load_data()
    sampler = ResumableSampler(len(train_set), args)
    loader = DataLoader(train_set, sampler.micro_batch, sampler=sampler, **loader_options(args, device))

    # 3. Model: it lies on the first device and is copied to the others in every step.
    model = job.ToyModel()
    if len(device_ids) > 1:
        if args.compile:
            raise UserError("--compile: nn.DataParallel copies the model in every step; use DDP, or one GPU")
        group.say(f"nn.DataParallel over {len(device_ids)} devices, {device_ids}; outputs on {device}")
        model = DataParallel(model.to(f"{args.device}:{device_ids[0]}"), device_ids, device)
    else:
        group.say(f"on {device} alone nn.DataParallel is the plain model; DDP is the better choice on any devices")
        model.to(device)
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
                    loss = job.loss(model(inputs), labels)  # outside the model, which returns what each sample gives
                run.backward(loss)
            run.step()
        run.evaluate(test_set, job.score)


if __name__ == "__main__":
    main()

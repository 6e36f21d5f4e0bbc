"""One process, many GPUs: nn.DataParallel.

When:  a script of one process should use all GPUs of its machine after a change of one line.
Not:   for speed. Every step copies the model to each GPU and gathers all outputs on one of them, driven by threads of a
       single Python process, and that GPU carries most of the memory. DDP does neither: ddp_spawn.py, ddp_torchrun.py.

    python dp_train.py                              # all accelerators, or the CPU
    python dp_train.py --device-ids 0,1 --output-device 1
"""

from common import job
from common.data import check_sets, move, train_loader
from common.errors import UserError, entry
from common.options import Options
from common.run import Run
from common.start import prepare

import torch
from torch import nn


def indices(text):
    return list(map(int, text.split(",")))


def choose_devices(args):
    """(device ids, output device); no ids on a CPU. Raises `UserError` where they are not there."""
    visible = list(range(0 if args.device == "cpu" else torch.accelerator.device_count()))
    ids, output = args.device_ids or visible, args.output_device
    if not set(ids) <= set(visible) or len(set(ids)) < len(ids) or output not in [None, *ids]:
        there = f"from {visible}, each once" if visible else f"none: {args.device} has no indices"
        raise UserError(f"--device-ids {ids}, --output-device {output}: take {there}, the output's from the ids")
    return ids, torch.device(args.device, output if output is not None or not ids else ids[0])


@entry
def main(argv=None):
    # 1. No process group: this process drives all devices.
    parser = Options(__doc__)
    parser.add_argument("--device-ids", type=indices, metavar="I,J,…", help="devices to use; default: all")
    parser.add_argument("--output-device", type=int, metavar="I", help="device of the outputs; default: the first")
    args = parser.parse_args(argv)
    device_ids, device = choose_devices(args)
    prepare(args, device)

    # 2. Data: whole batches, which DataParallel splits.
    train_set, test_set = check_sets(*job.load_data())
    loader = train_loader(train_set, args, device, job.collate)

    # 3. Model: it lies on the first device and is copied to the others in every step.
    model = job.ToyModel().to(f"{args.device}:{device_ids[0]}" if device_ids else device)
    if len(device_ids) > 1:
        if args.compile:
            raise UserError("--compile: nn.DataParallel copies the model in every step; use DDP, or one GPU")
        print(f"nn.DataParallel over {len(device_ids)} devices, {device_ids}; outputs on {device}")
        parallel = nn.DataParallel(model, device_ids, device)
        if args.dtype:  # by themselves its threads autocast to the default, fp16
            model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(args.device, args.dtype))
    else:
        print(f"on {device} alone nn.DataParallel is the plain model; DDP is the better choice on any devices")
        parallel = model
    if args.compile:
        parallel.compile()
    optimizer, schedule = job.make_optimizer(model, args, loader.sampler.total_steps)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")

    # 4. Training: what is named in Run is saved, and goes on with it.
    run = Run(args, loader, parallel, model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)
    for _ in run.epochs():
        for inputs, labels in run.batches():
            inputs, labels = move(inputs, device), move(labels, device)
            with torch.autocast(args.device, args.dtype, enabled=args.dtype is not None):
                loss = job.loss(parallel(inputs), labels)
            scaler.scale(loss / args.accum).backward()
            run.record(loss)
            if run.step_due:  # after --accum micro-batches
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

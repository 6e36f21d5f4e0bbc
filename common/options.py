"""The command line: the same names in every script."""

import argparse
import os
import shutil
import sys
import warnings
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import UserError, describe

import torch


class Options(argparse.ArgumentParser):
    """The options that all scripts share, and the groups of options that a script asks for; it may add its own.

    `parse_args` raises `UserError` for what is wrong at any world size. What it returns has a `dtype` too: that of
    autocast, or None.
    """

    def __init__(self, description, *, ddp=False, nprocs=False, launched=False):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter, allow_abbrev=False)
        add = self.add_argument
        add("--epochs", type=whole(1), default=20, metavar="N", help="default 20")
        add("--batch-size", type=whole(1), default=96, metavar="N", help="global: what one step sees; default 96")
        add("--lr", type=number(0, 1e9), default=0.2, metavar="X", help="learning rate; default 0.2")
        add("--seed", type=whole(0), default=0, metavar="N", help="of weights and order of samples; default 0")
        add("--steps", type=whole(1), metavar="N", help="stop after N optimizer steps in all")
        add("--device", default="auto", help="cpu, cuda, …; auto: the accelerator that torch finds, else cpu")
        add("--precision", choices=["fp32", "fp64", "bf16", "fp16"], default="fp32", help="bf16, fp16: autocast")
        add("--accum", type=whole(1), default=1, metavar="K", help="micro-batches per step; the result stays the same")
        add("--clip", type=number(0, 1e9), metavar="NORM", help="clip the norm of the gradient")
        add("--compile", action="store_true", help="torch.compile the model")
        add("--workers", type=whole(0, 1024), default=0, metavar="N", help="DataLoader workers per process; default 0")
        add("--threads", type=whole(1, 1024), metavar="N", help="CPU threads per process; default: its share of cores")
        add("--snapshot", type=Path, metavar="PATH", help="save to PATH and, where it exists, go on from it")
        add("--save-every", type=whole(1), metavar="N", help="save every N steps too, not just after each epoch")
        add("--timeout", type=number(1, 1e6), default=600, metavar="SECONDS", help="of waiting for others; default 600")
        add("--metrics", type=Path, metavar="PATH", help="append one JSON object a line")
        add("--tensorboard", type=Path, metavar="DIR", help="write scalars for TensorBoard")
        add("--log-every", type=whole(1), default=1, metavar="N", help="log every N steps to these; default 1")
        if ddp:
            add("--backend", default="auto", help="gloo, nccl, …; auto: the one that torch names for the device")
        if nprocs:
            add("--nprocs", type=whole(1, 1024), metavar="N", help="processes; default: a device each, 2 on a CPU")
        if launched:
            add("--init-method", type=init_method, default="env://", help="env://, tcp://HOST:PORT or file:///PATH")
            add("--local-rank", "--local_rank", type=whole(0), help=argparse.SUPPRESS)  # torch.distributed.launch

    def parse_args(self, *args):
        options = super().parse_args(*args)
        if options.save_every and not options.snapshot:
            raise UserError("--save-every needs --snapshot PATH: the file to save to")
        if options.snapshot and not is_utf8(options.snapshot):
            raise UserError(f"--snapshot {options.snapshot}: torch reads no path that is not UTF-8")
        written = [path.absolute() for path in (options.metrics, options.tensorboard, options.snapshot) if path]
        if options.snapshot:
            written += [Path(f"{written[-1]}{suffix}") for suffix in (".prev", ".tmp")]
        if len(set(written)) < len(written):
            raise UserError("--metrics, --tensorboard and --snapshot, with its .prev and .tmp: give each its own path")
        options.device = device_type(options.device)
        options.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
        check_precision(options)
        compiler = (os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")).split()[0]
        if options.compile and options.device == "cpu" and sys.platform != "win32" and not shutil.which(compiler):
            raise UserError(f"--compile needs a C++ compiler, and there is no {compiler}: install it, or set CXX")
        return options

    def error(self, message):
        raise UserError(f"{message}; see `python {self.prog} --help`")


def device_type(name):
    """The device type that `--device` means here, such as "cpu" or "cuda". Raises `UserError` where it is not here."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        # Apple's mps has neither float64 nor collectives of its own, so it is taken only when asked for.
        return found.type if found and found.type != "mps" else "cpu"
    if name != "cpu" and (found is None or found.type != name):
        have = f"cpu and {found.type}" if found else "cpu"
        raise UserError(f"--device {name}: this torch finds {have} here; name a kind, without an index")
    return name


def is_utf8(path):
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def check_precision(args):
    """Raise `UserError` where the device does not have it."""
    if args.precision == "fp64" and args.device == "mps":
        raise UserError("--precision fp64: mps has no float64")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns, and goes on in fp32
        try:
            torch.autocast(args.device, args.dtype, enabled=args.dtype is not None)
        except (RuntimeError, Warning) as error:
            raise UserError(f"--precision {args.precision} on {args.device}: {describe(error)}") from None


def whole(low, high=2**32):
    def parse(text):
        # No more digits than can be: Python refuses to read thousands.
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low} and at most {high}")
        return int(text)

    return parse


def number(low, high):
    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = -1
        if not low <= value <= high or not value:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {f'from {low}' if low else 'above 0'} to {high:g}"
            )
        return value

    return parse


def init_method(text):
    try:
        url = urlsplit(text)
        known = text == "env://" or (url.scheme == "tcp" and url.hostname and url.port) or text.startswith("file:///")
    except ValueError:  # a port that is no port
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of env://, tcp://HOST:PORT, file:///PATH")
    return text

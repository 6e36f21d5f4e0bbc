"""The command line: the same names in every script."""

import argparse
import time
from pathlib import Path
from urllib.parse import urlsplit

import common
from common.errors import UserError
from common.start import resolve

STARTS = [common.began]  # of the first run in this process; a notebook may have more


class Options(argparse.ArgumentParser):
    """The options that all scripts share, and the groups of options that a script asks for; it may add its own.

    `parse_args` raises `UserError` for what is wrong at any world size. What it returns has two more: `dtype`, that of
    autocast or None, and `began`, when the run did, in seconds as `time.time()` has them.
    """

    def __init__(self, description, *, ddp=False, nprocs=False, launched=False):
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        add, whole = self.add_argument, number(int, 1)
        add("--epochs", type=whole, default=20, metavar="N", help="default 20")
        add("--batch-size", type=whole, default=96, metavar="N", help="global: what one step sees; default 96")
        add("--lr", type=number(float, 1e-12), default=0.2, metavar="X", help="learning rate; default 0.2")
        add("--seed", type=number(int, 0), default=0, metavar="N", help="of weights and order of samples; default 0")
        add("--steps", type=whole, metavar="N", help="stop after N optimizer steps in all")
        add("--device", default="auto", help="cpu, cuda, …; auto: the accelerator that torch finds, else cpu")
        add("--precision", choices=["fp32", "fp64", "bf16", "fp16"], default="fp32", help="bf16, fp16: autocast")
        add("--accum", type=whole, default=1, metavar="K", help="micro-batches per step; the result stays the same")
        add("--clip", type=number(float, 1e-12), metavar="NORM", help="clip the norm of the gradient")
        add("--compile", action="store_true", help="torch.compile the model")
        add("--workers", type=number(int, 0, 1024), default=0, metavar="N", help="DataLoader workers per process")
        add("--threads", type=number(int, 1, 1024), metavar="N", help="CPU threads per process; default: its share")
        add("--snapshot", type=utf_8_path, metavar="PATH", help="save to PATH and, where it exists, go on from it")
        add("--save-every", type=whole, metavar="N", help="save every N steps too, not just after each epoch")
        add("--timeout", type=number(float, 1, 1e6), default=600, metavar="SECONDS", help="of waiting; default 600")
        add("--metrics", type=Path, metavar="PATH", help="append one JSON object a line")
        add("--tensorboard", type=Path, metavar="DIR", help="write scalars; needs `pip install tensorboard`")
        add("--log-every", type=whole, default=1, metavar="N", help="log every N steps to these; default 1")
        if ddp:
            add("--backend", default="auto", help="gloo, nccl, …; auto: the one that torch names for the device")
        if nprocs:
            add("--nprocs", type=number(int, 1, 1024), metavar="N", help="default: one per device, 2 on a CPU")
        if launched:
            add("--init-method", type=init_method, default="env://", help="env://, tcp://HOST:PORT or file:///PATH")
            add("--local-rank", "--local_rank", type=number(int, 0), help=argparse.SUPPRESS)  # torch.distributed.launch

    def parse_args(self, *args):
        options = super().parse_args(*args)
        options.began = STARTS.pop() if STARTS else time.time()
        if options.save_every and not options.snapshot:
            raise UserError("--save-every needs --snapshot PATH: the file to save to")
        saved = [f"{options.snapshot}{suffix}" for suffix in ("", ".prev", ".tmp") if options.snapshot]
        written = [Path(path).absolute() for path in (options.metrics, options.tensorboard, *saved) if path]
        if len(set(written)) < len(written):
            raise UserError("--metrics, --tensorboard and --snapshot, with its .prev and .tmp: give each its own path")
        resolve(options)
        return options

    def error(self, message):
        raise UserError(f"{message}; see `python {self.prog} --help`")


def number(kind, low, high=2**32):
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:.15g} to {high:.15g}")
        return value

    parse.__name__ = kind.__name__  # argparse says it where a text is none
    return parse


def utf_8_path(text):
    """torch reads no other."""
    return Path(text.encode().decode())


def init_method(text):
    url = urlsplit(text)
    if text != "env://" and not (url.scheme == "tcp" and url.hostname and url.port) and not text.startswith("file:///"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of env://, tcp://HOST:PORT, file:///PATH")
    return text

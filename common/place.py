"""The place of a process among all, and the backend and the devices that follow from it."""

from dataclasses import dataclass

from common.errors import UserError

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """The place of a process among all processes, and among those of its machine; and what its launcher does for it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str | None = None  # its name
    init_method: str = "env://"  # how the ranks find each other
    node: int = 0  # the rank of the machine
    cpus: int | None = None  # of this process, where the launcher has given it some
    own_devices: bool = False  # the launcher may show each process just its own
    serves_store: bool = False  # the launcher serves the store; else rank 0 does

    @property
    def one_machine(self):
        return self.local_world_size == self.world_size


def resolve_backend(name, device_type):
    """The backend that `--backend` means here. Raises `UserError` where torch lacks it or the device is not for it."""
    if name == "auto":
        name = dist.get_default_backend_for_device(device_type)
    known = set(dist.Backend.backend_list) - {"fake", "undefined"}
    have = {backend for backend in known if dist.is_backend_available(backend)}
    if name not in have:
        raise UserError(f"--backend {name}: this torch has {', '.join(sorted(have))}")
    if device_type not in dist.Backend.backend_capability.get(name, [device_type]):
        kinds = " or ".join(dist.Backend.backend_capability[name])
        raise UserError(f"--backend {name} works on {kinds}, not on {device_type}: leave it out, or use gloo")
    return name


def local_devices(args, ranks, each=1):
    """The `each` devices of this process, chosen by its local rank so that no two processes share one.

    Raises `UserError` where the machine shows too few for its processes.
    """
    if args.device == "cpu":
        return [torch.device("cpu")] * each
    visible = torch.accelerator.device_count()
    needed = ranks.local_world_size * each
    first = ranks.local_rank * each
    if visible == ranks.local_world_size == 1:
        return [torch.device(args.device, 0)] * each  # nothing to choose: one process, one device
    if visible < needed:
        if not ranks.own_devices or visible != each:
            raise UserError(
                f"{ranks.local_world_size} processes with {each} {args.device} device(s) each need {needed}, "
                f"this machine shows {visible}: start fewer processes, or use --device cpu"
            )
        first = 0  # the launcher shows each process just its own
    return [torch.device(args.device, first + index) for index in range(each)]

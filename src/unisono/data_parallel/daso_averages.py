"""What ranks share at the end of an epoch besides parameters: buffers and optimizer state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator
from unisono.data_parallel.daso_flat import flatten, write_back
from unisono.data_parallel.ranks import broadcast_tensors, on_device

__all__ = ["average_buffers", "average_state"]


def average_buffers(module: nn.Module, comm: Communicator) -> None:
    """Give all ranks the mean of float buffers and rank 0's other ones. Collective."""
    buffers = list(module.buffers())
    average([x for x in buffers if x.is_floating_point() or x.is_complex()], comm)
    broadcast_tensors([x for x in buffers if not (x.is_floating_point() or x.is_complex())], comm)


def average_state(optimizer: Optimizer, comm: Communicator) -> None:
    """Give all ranks the mean of the optimizer state that has a parameter's shape. Collective.

    A rank whose parameter never had a gradient has no state for it; what not all ranks have stays.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own: dict[tuple[int, str], Tensor] = {
        (i, name): value
        for i, param in enumerate(params)
        for name, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point()
    }
    shared = set.intersection(*map(set, comm.all_gather_object(sorted(own))))
    average([own[key] for key in sorted(shared)], comm)


def average(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Replace tensors by their mean over ranks: one message for each device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for x in tensors:
        kinds[x.device, x.dtype].append(x)
    for (device, _), members in kinds.items():
        flat = flatten(members)
        on_device(comm, device).all_reduce_(flat, "mean")
        write_back(flat, members)

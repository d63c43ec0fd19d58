"""What an elastic training refuses, since its results would depend on the number of members."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.comm import Communicator
from unisono.comm import call as calls
from unisono.errors import PlatformError, UnisonoError, an
from unisono.expect import expect
from unisono.launch.context import here
from unisono.train.exact.link import is_member

_COMMUNICATE = {
    *("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "SyncBatchNorm")
}
"""Classes of modules that talk to other ranks in each forward, by their names."""


def check_loss(loss: Any) -> None:
    """Raise unless a closure has returned one number that depends on parameters."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        problem, hint = type(loss).__name__, "return the mean loss of the batch, one element"
        if isinstance(loss, Tensor):
            problem = f"a tensor of shape {list(loss.shape)}, requires_grad={loss.requires_grad}"
            if not loss.requires_grad:
                hint = (
                    "compute it from parameters with requires_grad=True, outside of "
                    "torch.no_grad(), without .detach(), .item() or .data"
                )
        raise UnisonoError.because(
            "the closure of an elastic step", f"it returned {problem}", hint=hint
        )


def check_calls(latest: calls.Call | None) -> None:
    """Refuse a closure that has called a collective: how often, and with whom, is unknown."""
    if (call := calls.latest_call) is not latest and call is not None:
        raise UnisonoError.because(
            "the closure of an elastic step",
            f"it called {call.op}: a closure runs once per shard, again for shards of ranks that "
            "died, and each member is a world of one, so nothing was exchanged",
            hint="return the mean loss of the batch, step.log(name=value) for other means; "
            "your own collectives belong into a world that stays, unisono.run(..., elastic=False)",
        )


def check_world(shards: int) -> None:
    """Raise in a world that stays as it is; warn of ranks without work."""
    place = here()
    if is_member():
        if place is not None and place.rank == 0 and (most := place.platform.world_size) > shards:
            warnings.warn(
                f"elastic(..., shards={shards}) on up to {most} ranks: {most - shards} of them "
                f"have nothing to compute; shards={most} or more gives work to all",
                UserWarning,
                stacklevel=3,
            )
    elif (size := Communicator.of(None).size) > 1:
        raise PlatformError.because(
            "unisono.train.elastic(...)",
            f"a world of {size} ranks that stays as it is: each would train on its own",
            hint=f"unisono.run(train, ranks={size}, elastic=True)",
        )


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot be the same for any number of members."""
    expect("model", model, nn.Module)
    expect("optimizer", optimizer, torch.optim.Optimizer)
    call = f"unisono.train.elastic({type(model).__name__}, optimizer, ...)"
    for name, module in model.named_modules():
        if not _COMMUNICATE.isdisjoint(kind.__name__ for kind in type(module).__mro__):
            raise PlatformError.because(
                call,
                f"{name or 'the model'} is {an(type(module).__name__)}, which talks to other ranks",
                hint="the plain module: elastic adds up gradients and averages buffers itself",
            )
    device = device_of(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor) or tensor.device != device or tensor.is_meta:
            where = "split over ranks" if isinstance(tensor, DTensor) else f"on {tensor.device}"
            raise PlatformError.because(
                call,
                f"{name} is {where}",
                None if tensor.device == device else f"{tensor.device} != {device}, of the others",
                "whole tensors, all on the CPU or all on the device of this rank",
            )
    module_ids = {id(p) for p in model.parameters()}
    stray = sum(
        id(p) not in module_ids for group in optimizer.param_groups for p in group["params"]
    )
    if stray:
        raise PlatformError.because(
            call,
            f"{stray} tensors of the optimizer are not parameters of the model",
            hint="one module that holds all: nn.ModuleList([encoder, head])",
        )


def device_of(model: nn.Module) -> torch.device:
    """Return where the tensors of a model are."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))

"""DDPW's `functional`: what training functions need on every platform.

One call fits all platforms: what a helper does follows from the rank it is called in.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from unisono import accelerator
from unisono.accelerator import is_accelerator
from unisono.comm import Communicator, detect, has_world
from unisono.comm.collectives import all_reduce_together
from unisono.data_parallel.batch_norm import has_batch_norm, synchronised
from unisono.errors import PlatformError
from unisono.launch.context import device_of, here, rank_device, seed_generators
from unisono.launch.platform import Device, Platform, gpu_index

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "average_params_grads",
    "device",
    "get_dataset_sampler",
    "has_batch_norm",
    "optimiser_to",
    "seed_generators",
    "set_default_device",
    "set_device",
    "to",
]

device = device_of


def average_params_grads(
    module: nn.Module,
    params: bool = True,
    grads: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace parameters, gradients or both by their mean over the ranks, in place.

    Collective over `group` (default: the world). A parameter that has a gradient on some ranks only
    counts as zero on the others, and all get the mean. Integers have none, and stay. Does nothing
    in a world of one.
    """
    if not (params or grads) or not has_world():
        return
    comm = Communicator.of(group)
    if comm.size == 1:
        return
    weights = list(module.parameters())
    with torch.no_grad():
        tensors = _agreed_gradients(weights, comm) if grads else []
        tensors += [p.data for p in weights if params and (p.is_floating_point() or p.is_complex())]
        for place in dict.fromkeys(tensor.device for tensor in tensors):
            here = [tensor for tensor in tensors if tensor.device == place]
            all_reduce_together(comm.with_device(place), here, "mean")


def _agreed_gradients(weights: list[nn.Parameter], comm: Communicator) -> list[Tensor]:
    """Return the gradients that any rank has; a rank without one gets zeros."""
    kinds = [0 if p.grad is None else 2 if p.grad.is_sparse else 1 for p in weights]
    codes = torch.tensor(kinds, dtype=torch.int32)
    anywhere = comm.with_device("cpu").all_reduce(codes, op="max").tolist()
    if 2 in anywhere:  # on any rank: all of them raise
        raise PlatformError.because(
            "average_params_grads(..., grads=True)",
            "a sparse gradient",
            None,
            "nn.Embedding(..., sparse=False)",
        )
    gradients: list[Tensor] = []
    for weight, is_there in zip(weights, anywhere, strict=True):
        if is_there:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.append(weight.grad)
    return gradients


def optimiser_to(optimiser: Optimizer, device: torch.device | str) -> None:
    """Move the state of an optimiser to a device, in place.

    Step counters stay on the CPU unless the optimiser wants them on the device (`capturable` or
    `fused`).
    """
    for group in optimiser.param_groups:
        wants_steps = bool(group.get("capturable") or group.get("fused"))
        for weight in group["params"]:
            state = optimiser.state.get(weight, {})
            for name, value in state.items():
                if name != "step" or wants_steps:
                    state[name] = _moved(value, device)


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(entry, device) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(entry, device) for entry in value)
    return value


def to(
    module: nn.Module,
    local_rank: int,
    sync_modules: bool = True,
    device: torch.device | str | None = None,
    *ddp_args: Any,
    **ddp_kwargs: Any,
) -> nn.Module:
    """Move a module to this rank's device and keep its replicas equal during training.

    Collective over the world if `sync_modules`: batch norms then use the whole batch of all ranks,
    and the module is wrapped in `DistributedDataParallel` (in a world of one, too, so `.module` is
    always there; not if it has nothing to train).

    Args:
        module: the model.
        local_rank: place of this rank on its node; picks the GPU where `device` has no number.
            Fewer GPUs than ranks are refused, unless the platform says `oversubscribe`.
        sync_modules: whether to synchronise.
        device: where to; None is the device of this rank.
        ddp_args: more arguments for `DistributedDataParallel`.
        ddp_kwargs: more arguments for `DistributedDataParallel`.
    """
    place = rank_device() if device is None else torch.device(device)
    if is_accelerator(place) and place.index is None:
        place = torch.device(place.type, _index_of(local_rank, place.type))
    module = module.to(place)
    if not sync_modules or not has_world():
        return module
    if dist.get_world_size() > 1 and has_batch_norm(module):
        module = synchronised(module, place)
    if not any(p.requires_grad for p in module.parameters()):
        return module
    if is_accelerator(place) and not ddp_args:
        ddp_kwargs.setdefault("device_ids", [place.index])
    return DistributedDataParallel(module, *ddp_args, **ddp_kwargs)


def _index_of(local_rank: int, kind: str) -> int:
    """Return the number of the device of a rank, or explain that its node has too few."""
    me, visible = here(), accelerator.count(kind)
    size = max(detect().local_size, local_rank + 1)
    shares = me is not None and me.platform.oversubscribe
    index = gpu_index(local_rank, size, visible, oversubscribe=shares)
    if index is None:
        raise PlatformError.because(
            f"functional.to(module, local_rank={local_rank}, device={kind!r})",
            f"{visible} visible ({accelerator.visibility()}), and each rank needs its own",
            f"{size} ranks of this node > {visible}",
            f'device="{kind}:0", or Platform(oversubscribe=True), to share one; device="cpu"',
        )
    return index


def get_dataset_sampler(
    dataset: Dataset[Any],
    global_rank: int,
    platform: Platform,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler[Any] | None:
    """Return the sampler of this rank's share of `dataset`; None in a world of one."""
    if isinstance(dataset, IterableDataset):
        raise PlatformError.because(
            f"get_dataset_sampler({type(dataset).__name__}, ...)",
            "an IterableDataset, from which no sampler can draw",
            None,
            "skip records by rank inside its __iter__",
        )
    if platform.world_size == 1:
        return None
    return DistributedSampler(
        dataset,
        num_replicas=platform.world_size,
        rank=global_rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def set_default_device(local_rank: int, platform: Platform) -> None:
    """Make this rank's GPU the default for new tensors; does nothing on CPU and MPS."""
    place = platform.torch_device(local_rank)
    if platform.kind is not Device.MPS and is_accelerator(place):
        accelerator.set_device(place)
        torch.set_default_device(place)


def set_device(local_rank: int, platform: Platform) -> None:
    """Do what `set_default_device` does; an older spelling."""
    warnings.warn("set_device is now set_default_device", DeprecationWarning, stacklevel=2)
    set_default_device(local_rank, platform)

"""What training functions need on every platform: seeds, averages, devices, samplers.

One call fits all platforms: what a helper does follows from the rank it is called in.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from unisono import accelerator
from unisono.accelerator import is_accelerator
from unisono.comm import Communicator, detect, has_world, world
from unisono.comm.collectives import all_reduce_together
from unisono.errors import PlatformError
from unisono.launch.context import here
from unisono.launch.platform import Device, Platform, gpu_index
from unisono.torch_private import BatchNormBase

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

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, numpy, torch and all its devices in this process."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
    place = _rank_device() if device is None else torch.device(device)
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


def device(module: nn.Module) -> torch.device:
    """Return where a module is: its first parameter, else its first buffer, else this rank."""
    tensors: Iterable[Tensor] = (*module.parameters(), *module.buffers())
    return next((tensor.device for tensor in tensors), _rank_device())


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


def _rank_device() -> torch.device:
    """Return the device of this rank; the CPU in a process that is not a rank."""
    me = here()
    return me.device if me is not None else torch.device("cpu")


def has_batch_norm(module: nn.Module) -> bool:
    """Whether any submodule is a `BatchNorm1d`, `2d` or `3d`."""
    return any(isinstance(part, _BATCH_NORMS) for part in module.modules())


def synchronised(
    module: nn.Module, place: torch.device, comm: Communicator | None = None
) -> nn.Module:
    """Return the module with batch norms that use the whole batch of all ranks of `comm`.

    None is the world. Layers are exchanged in place; parameters and buffers stay the same objects.
    """
    if _has_batch_norm_kernels(place):
        group = None if comm is None else comm.process_group()
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
    return _converted(module, comm)


def _has_batch_norm_kernels(place: torch.device) -> bool:
    """Whether torch's `SyncBatchNorm` runs on a device: its kernels are not there on all."""
    try:
        torch.batch_norm_stats(torch.zeros(1, 1, device=place), 1e-5)
    except RuntimeError:
        return False
    return True


def _converted(module: nn.Module, comm: Communicator | None) -> nn.Module:
    if isinstance(module, _BATCH_NORMS):
        return SharedBatchNorm.of(module, comm)
    for name, child in module.named_children():
        new = _converted(child, comm)
        if new is not child:
            setattr(module, name, new)
    return module


class SharedBatchNorm(BatchNormBase):
    """Batch norm over the batches of all ranks of the world. Training is collective over it."""

    comm: Communicator | None = None
    """Other ranks than those of the world."""

    @classmethod
    def of(cls, norm: BatchNormBase, comm: Communicator | None = None) -> SharedBatchNorm:
        """Return one that shares parameters and statistics with `norm`."""
        twin = cls(
            norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
        )
        twin.weight, twin.bias = norm.weight, norm.bias
        twin.running_mean, twin.running_var = norm.running_mean, norm.running_var
        twin.num_batches_tracked = norm.num_batches_tracked
        twin.training = norm.training
        twin.comm = comm
        return twin

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs (N, C, ...), got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `(N, C, ...)` over N and what follows C, on all ranks together."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        comm = world() if self.comm is None else self.comm
        x = input if input.dtype in (torch.float32, torch.float64) else input.float()
        dims = [d for d in range(x.dim()) if d != 1]
        count = x.new_full((1,), x.numel() / max(1, x.shape[1]))
        sums = _AllReduceSum.apply(torch.cat([x.sum(dims), count]), comm)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - _along_channels(mean, x)
        variance = _AllReduceSum.apply(centred.square().sum(dims), comm) / total
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), total.item())
        y = centred * _along_channels(torch.rsqrt(variance + self.eps), x)
        if self.affine:
            y = y * _along_channels(self.weight, x) + _along_channels(self.bias, x)
        return y.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor, total: float) -> None:
        if self.num_batches_tracked is None or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        if self.running_var is not None:
            unbiased = variance * (total / max(total - 1.0, 1.0))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _AllReduceSum(torch.autograd.Function):
    """The gradient of a sum over the ranks that all of them use is such a sum again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.with_device(x.device).all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllReduceSum.apply(grads[0], ctx.comm), None


def _along_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *(1,) * (like.dim() - 2))

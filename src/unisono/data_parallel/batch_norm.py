"""Batch norms over the batches of all ranks: torch's where its kernels run, else one of ours."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unisono.comm import Communicator, world
from unisono.operators.reduce import all_sum_reduce
from unisono.torch_private import BatchNormBase

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
        comm = (world() if self.comm is None else self.comm).with_device(input.device)
        x = input if input.dtype in (torch.float32, torch.float64) else input.float()
        dims = [d for d in range(x.dim()) if d != 1]
        count = x.new_full((1,), x.numel() / max(1, x.shape[1]))
        sums = all_sum_reduce(torch.cat([x.sum(dims), count]), comm=comm)
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = x - _along_channels(mean, x)
        variance = all_sum_reduce(centred.square().sum(dims), comm=comm) / total
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


def _along_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *(1,) * (like.dim() - 2))

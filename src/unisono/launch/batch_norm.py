"""Batch norm over the batches of all ranks, on CPU and MPS, where torch has none.

Counts may differ between ranks. Statistics are all-reduced differentiably, so gradients are those
of one process with the joined batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.comm import Communicator, world

__all__ = ["SharedBatchNorm", "has_batch_norm", "synchronised"]

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(module: nn.Module) -> bool:
    """Whether any submodule is a `BatchNorm1d`, `2d` or `3d`."""
    return any(isinstance(part, _KINDS) for part in module.modules())


def synchronised(module: nn.Module, place: torch.device) -> nn.Module:
    """Return the module with batch norms that use the whole batch of all ranks."""
    if place.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return _converted(module)


def _converted(module: nn.Module) -> nn.Module:
    if isinstance(module, _KINDS):
        return SharedBatchNorm.of(module)
    for name, child in module.named_children():
        new = _converted(child)
        if new is not child:
            setattr(module, name, new)
    return module


class SharedBatchNorm(_BatchNorm):
    """Batch norm over the batches of all ranks of the world. Training is collective over it."""

    @classmethod
    def of(cls, norm: _BatchNorm) -> SharedBatchNorm:
        """Return one that shares parameters and statistics with `norm`."""
        twin = cls(
            norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
        )
        twin.weight, twin.bias = norm.weight, norm.bias
        twin.running_mean, twin.running_var = norm.running_mean, norm.running_var
        twin.num_batches_tracked = norm.num_batches_tracked
        twin.training = norm.training
        return twin

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs (N, C, ...), got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `(N, C, ...)` over N and what follows C, on all ranks together."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        comm = world()
        x = input if input.dtype in (torch.float32, torch.float64) else input.float()
        dims = [d for d in range(x.dim()) if d != 1]
        count = torch.full((1,), x.numel() / max(1, x.shape[1]), dtype=x.dtype)
        total = comm.all_reduce(count)
        mean = all_reduce_sum(x.sum(dims), comm) / total
        centred = x - _along_channels(mean, x)
        variance = all_reduce_sum(centred.square().sum(dims), comm) / total
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


def all_reduce_sum(x: Tensor, comm: Communicator) -> Tensor:
    """Sum over the ranks, differentiably: the gradient of a sum that all use is a sum again."""
    return _AllReduceSum.apply(x, comm)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.with_device(x.device).all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grads[0], ctx.comm), None


def _along_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *(1,) * (like.dim() - 2))

"""Batch normalisation over the rows of all ranks, on any device: the statistics of one process.

torch's own `SyncBatchNorm` does the same on some accelerators only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.comm import Communicator
from unisono.data_parallel.ranks import on_device
from unisono.operators import all_sum_reduce


class SyncBatchNorm(_BatchNorm):
    """Normalises by mean and variance over the rows of all ranks. Collective in training.

    Made by `synchronised` from a layer, whose parameters and buffers it takes.
    """

    comm: Communicator

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input."""
        x = input
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or self.comm.size == 1:
            return super().forward(x)
        comm = on_device(self.comm, x.device)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        rows = wide.new_tensor([math.prod(x.shape[d] for d in dims)])
        sums = all_sum_reduce(torch.cat([wide.sum(dims), rows]), comm=comm)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - mean.view(shape)
        # Not the mean of squares less the square of the mean, which loses digits.
        variance = all_sum_reduce((centred * centred).sum(dims), comm=comm) / count
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        if self.training and self.track_running_stats:
            self._note(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        return y.to(x.dtype)

    @torch.no_grad()
    def _note(self, mean: Tensor, variance: Tensor) -> None:
        """Take statistics of a batch into those that evaluation uses."""
        if self.running_mean is None or self.running_var is None:
            return
        share: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / self.num_batches_tracked
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1 - share).add_(new.to(running.dtype) * share)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected rows of features, got {input.dim()} dims")


def synchronised(module: nn.Module, comm: Communicator) -> nn.Module:
    """Return a module whose batch normalisation has the statistics of all ranks. Local.

    Layers inside of it are exchanged in place, as by torch's `convert_sync_batchnorm`; parameters
    and buffers stay the same objects.
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
        synced = SyncBatchNorm.__new__(SyncBatchNorm)
        synced.__dict__.update(module.__dict__)
        synced.comm = comm
        return synced
    for name, child in list(module.named_children()):
        module._modules[name] = synchronised(child, comm)
    return module

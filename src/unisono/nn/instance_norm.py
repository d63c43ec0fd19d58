"""Instance normalisation over split space: every channel of a sample is a group of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.errors import PartitionError
from unisono.nn.group_norm import DistributedGroupNorm
from unisono.nn.parameters import Holding, Weights, nothing
from unisono.topology import Partition
from unisono.topology.decompose import block

__all__ = ["DistributedInstanceNorm"]


class DistributedInstanceNorm(DistributedGroupNorm):
    """`torch.nn.InstanceNorm1d/2d/3d` of a tensor of 3 to 5 dims, split in any of them.

    Args:
        P_x: partition of the input; dim 1 splits the channels, in balanced blocks.
        num_features: channels of the whole tensor.
        eps: added to the variance.
        momentum: weight of a new batch in the running statistics; None: they stay.
        affine: learn a scale and a shift.
        bias: False leaves out the shift.
        track_running_stats: keep means of the samples' statistics, used in eval mode.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weights: Weights = "replicated",
    ) -> None:
        if not 3 <= P_x.dim <= 5:
            raise PartitionError.because(
                f"DistributedInstanceNorm on {P_x!r}",
                f"{P_x.dim} dims",
                "needs 3 to 5",
                "Partition([1, 1, 2]): batch, channels, then space",
            )
        super().__init__(
            P_x, num_features, num_features, eps, affine,
            bias=bias, device=device, dtype=dtype, weights=weights,
        )  # fmt: skip
        self.num_features = num_features
        self.momentum = momentum
        self.track_running_stats = tracked = track_running_stats
        held = nothing((num_features,))
        if P_x.active and P_x.index is not None:
            c0, c1 = block(num_features, P_x.shape[1], P_x.index[1])
            held = Holding((num_features,), (c0,), (c1 - c0,))
        mean = torch.zeros(held.shape, dtype=dtype, device=device) if tracked else None
        var = torch.ones(held.shape, dtype=dtype, device=device) if tracked else None
        number = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("running_mean", mean)
        self.register_buffer("running_var", var)
        self.register_buffer("num_batches_tracked", number)  # torch has it, and does not count
        for name in ("running_mean", "running_var"):
            self._hold(name, held, replicated=self._is_everywhere)

    def _describe(self) -> tuple[object, ...]:
        return (*super()._describe(), self.momentum, self.track_running_stats)

    def _normalised_block(self, x: Tensor) -> Tensor:
        wide = self._wide(x)
        if not self.training and self.running_mean is not None and self.running_var is not None:
            shape = (1, -1, *(1,) * (x.dim() - 2))
            variance = self.running_var.to(torch.promote_types(wide.dtype, self.running_var.dtype))
            inverse = torch.rsqrt(variance + self.eps).view(shape)
            return self._scaled((wide - self.running_mean.view(shape)) * inverse).to(x.dtype)
        if self._plan.total == 1:
            self._refuse_one_value("a larger image, or eval() with running statistics")
        y, mean, squares = self._normalised(wide)
        if self.training:
            self._track(mean, squares)
        return self._scaled(y).to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, squares: Tensor) -> None:
        """Move the running statistics towards the means over samples. Collective over the batch."""
        samples = self._plan.global_shape[0]
        if self.running_mean is None or self.running_var is None or samples == 0:
            return
        sums = torch.stack([mean, squares / max(self._plan.total - 1, 1)]).sum((1, 3))
        batch = self.P_x.sub(0)
        if batch.size > 1:
            sums = batch.comm.all_reduce(sums)
        factor = 0.0 if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, sums[0]), (self.running_var, sums[1])):
            running.lerp_((new / samples).to(running.dtype), factor)

"""Losses of classes on split tensors: classes may be split too, the value is that of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import PartitionError, UnisonoError
from unisono.nn.loss import WeightedLoss, summed
from unisono.nn.structure import Table
from unisono.operators import sum_to_replicated
from unisono.topology import Partition

__all__ = ["DistributedCrossEntropyLoss", "DistributedNLLLoss"]


class DistributedNLLLoss(WeightedLoss):
    """`torch.nn.NLLLoss` of split tensors; dim 1 (the classes) may be split too.

    Args:
        P_x: partition of the input `(N, C, ...)`.
        weight: one weight for each class of the whole.
        ignore_index: target that does not count.
        reduction: "none", "mean" (over the weights of what counts) or "sum".
    """

    _word_travels = "before"

    def __init__(
        self,
        P_x: Partition,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, weight, reduction)
        if P_x.dim < 2:
            raise PartitionError.because(
                f"{type(self).__name__} on {P_x!r}",
                f"{P_x.dim} dims",
                "needs 2 or more",
                "Partition([2, 1]): batch, classes",
            )
        self.ignore_index = ignore_index

    def _options(self) -> tuple[object, ...]:
        return (self.weight is None, self.ignore_index)

    def _make_plan(self, tables: Sequence[Table]) -> tuple[int, int]:
        tables[0].dtype(self.P_x)
        cuts = tables[0].cuts(self.P_x)
        for rank in self.P_x.ranks:
            shape = tables[0].of(rank).shape
            target = tables[1].of(rank).shape
            if (shape[0], *shape[2:]) != target:
                raise PartitionError.because(
                    type(self).__name__,
                    f"rank {rank}: input of {list(shape)}, target of {list(target)}",
                    f"{[shape[0], *shape[2:]]} != {list(target)}",
                    "the target has the input's blocks without the class dim",
                )
        index = self.P_x.index
        return (cuts[1][index[1]] if index is not None else 0), cuts[1][-1]

    def _normaliser(self, x: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the logarithm to subtract at each position, a value all class ranks share."""
        return None

    def _problem_of(self, input: tuple[Any, ...]) -> UnisonoError | None:
        problem = super()._problem_of(input)
        if problem is None and len(input) > 1 and self.P_x.active:
            # Where classes are split, their number is known once ranks have met: see `forward`.
            classes = input[0].shape[1] if self.P_x.shape[1] == 1 and input[0].dim() > 1 else None
            problem = self._stray_target(input[1], classes)
        return problem

    def _stray_target(self, target: Tensor, classes: int | None) -> UnisonoError | None:
        """Return the error for a target that is no class, if there is one."""
        if target.dtype.is_floating_point or target.is_meta:
            return None
        counted = target[target != self.ignore_index]
        low, high = counted.aminmax() if counted.numel() else (0, 0)
        if low >= 0 and (classes is None or high < classes):
            return None
        return PartitionError.because(
            f"{type(self).__name__} with targets from {int(low)} to {int(high)}",
            f"{'?' if classes is None else classes} classes",
            f"{int(low)} < 0" if low < 0 else f"{int(high)} >= {classes}",
            f"targets from 0 on, or ignore_index={int(low if low < 0 else high)}",
        )

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of the whole tensors; with reduction "none" one value a position."""
        x = input
        if not self._takes_part:
            return self._outside(x).sum()
        if self.P_x.shape[1] > 1 and (stray := self._stray_target(target, self._plan[1])):
            raise stray
        tied = self._tied(x)
        losses, weights = self._positions(tied, target, self._normaliser(tied))
        is_cast = torch.is_autocast_enabled(x.device.type)  # then torch's losses are in float32
        dtype = _wide(x[:0]).dtype if is_cast else x.dtype
        if self.reduction == "none":
            return losses.to(dtype)
        comm = self.P_x.sub(tuple(d for d in range(self.P_x.dim) if d != 1)).comm
        total = sum_to_replicated(summed(losses), comm=comm)
        if self.reduction == "mean":
            total = total / comm.all_reduce(summed(weights))
        return total.to(dtype)

    def _positions(
        self, x: Tensor, target: Tensor, normaliser: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return loss and weight of each position, equal on all ranks that share it."""
        start, _ = self._plan
        picked = self._picked(-x, target, start)
        if normaliser is not None:
            picked = picked + normaliser
        counted = target != self.ignore_index
        weights = counted.to(picked.dtype)
        if self.weight is not None:
            weights = weights * self.weight.to(picked)[target.masked_fill(~counted, 0)]
        return torch.where(weights != 0, picked * weights, torch.zeros_like(picked)), weights

    def _picked(self, values: Tensor, target: Tensor, start: int) -> Tensor:
        """Return the value at the target class, from whichever rank holds it."""
        here = (target >= start) & (target < start + values.shape[1])
        if values.shape[1] == 0:
            own = values.sum(1)
        else:
            local = (target - start).clamp(0, values.shape[1] - 1)
            own = values.gather(1, local.unsqueeze(1)).squeeze(1)
            own = torch.where(here, own, torch.zeros_like(own))
        return sum_to_replicated(own, comm=self.P_x.sub(1).comm)


class DistributedCrossEntropyLoss(DistributedNLLLoss):
    """`torch.nn.CrossEntropyLoss` of split tensors; dim 1 (the classes) may be split too.

    Arguments as `DistributedNLLLoss`; `label_smoothing` as in torch.
    """

    def __init__(
        self,
        P_x: Partition,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(P_x, weight, ignore_index, reduction)
        if not 0.0 <= label_smoothing <= 1.0:
            raise PartitionError.because(
                f"DistributedCrossEntropyLoss(label_smoothing={label_smoothing})",
                None,
                f"not 0 <= {label_smoothing} <= 1",
                "label_smoothing=0.1",
            )
        self.label_smoothing = label_smoothing

    def _options(self) -> tuple[object, ...]:
        return (*super()._options(), self.label_smoothing)

    def _normaliser(self, x: Tensor) -> Tensor:
        x = _wide(x)
        classes = self.P_x.sub(1).comm
        if classes.size == 1:
            return x.logsumexp(1)
        lowest = torch.finfo(x.dtype).min
        own = x.detach().amax(1) if x.shape[1] else x.new_full((x.shape[0], *x.shape[2:]), lowest)
        top = classes.all_reduce(own, "max")
        total = sum_to_replicated((x - top.unsqueeze(1)).exp().sum(1), comm=classes)
        return top + total.log()

    def _positions(
        self, x: Tensor, target: Tensor, normaliser: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        losses, weights = super()._positions(x, target, normaliser)
        if self.label_smoothing == 0.0 or normaliser is None:
            return losses, weights
        x = _wide(x)
        start, classes = self._plan
        every = x.new_ones(classes) if self.weight is None else self.weight.to(x)
        own = every[start : start + x.shape[1]].reshape(1, -1, *(1,) * (x.dim() - 2))
        spread = sum_to_replicated((-x * own).sum(1), comm=self.P_x.sub(1).comm)
        spread = (spread + every.sum() * normaliser) * (target != self.ignore_index)
        smooth = self.label_smoothing
        return (1 - smooth) * losses + smooth / classes * spread, weights


def _wide(x: Tensor) -> Tensor:
    """Return 16-bit values as float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

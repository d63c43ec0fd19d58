"""Losses of split tensors: the value of the whole, on every rank.

Each rank calls `backward()` once and gets the gradient of its own block, as one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono import torch_private as private
from unisono.accelerator import is_accelerator
from unisono.comm import Communicator
from unisono.errors import PartitionError, UnisonoError
from unisono.expect import expect_choice
from unisono.nn.agreement import Table
from unisono.nn.layers.shell import Shell
from unisono.nn.planned import PlannedModule, check_dims
from unisono.nn.precision import sum_dtype, wide
from unisono.nn.split_tensors.pointwise import label_weights
from unisono.operators import sum_to_replicated
from unisono.topology import Partition


class _Loss(Shell):
    """A loss that is a sum over elements."""

    _balances = False
    _function: ClassVar[Callable[..., Tensor]]
    """Torch's function of input and target."""
    _options: ClassVar[tuple[str, ...]] = ()
    """Attributes that it takes by name."""
    _valid_reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")

    def __init__(self, P_x: Partition, reduction: str = "mean") -> None:
        super().__init__()
        expect_choice("reduction", reduction, self._valid_reductions, error=PartitionError)
        self.P_x = P_x
        self.reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of the whole tensors; with reduction "none" that of the own block."""
        if not self._takes_part:
            return self._outside(input).sum()
        options = {name: getattr(self, name) for name in self._options}
        for name, value in options.items():
            if isinstance(value, Tensor):  # a weight of points, in any shape that fits the block
                options[name] = value.expand_as(input)
        return self._called(
            self._function, self._tied(input), target, reduction=self.reduction, **options
        )


class DistributedL1Loss(_Loss):
    """`torch.nn.L1Loss` of split tensors."""

    _function = staticmethod(F.l1_loss)


class DistributedMSELoss(_Loss):
    """`torch.nn.MSELoss` of split tensors."""

    _function = staticmethod(F.mse_loss)


class DistributedPoissonNLLLoss(_Loss):
    """`torch.nn.PoissonNLLLoss` of split tensors."""

    _function = staticmethod(F.poisson_nll_loss)
    _options = ("log_input", "full", "eps")

    def __init__(
        self,
        P_x: Partition,
        log_input: bool = True,
        full: bool = False,
        eps: float = 1e-8,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, reduction)
        self.log_input = log_input
        self.full = full
        self.eps = eps


class DistributedBCELoss(_Loss):
    """`torch.nn.BCELoss` of split tensors; `weight` fits the own block."""

    _function = staticmethod(F.binary_cross_entropy)
    _options = ("weight",)
    weight: Tensor | None

    def __init__(
        self, P_x: Partition, weight: Tensor | None = None, reduction: str = "mean"
    ) -> None:
        super().__init__(P_x, reduction)
        self.register_buffer("weight", weight)


class DistributedBCEWithLogitsLoss(DistributedBCELoss):
    """`torch.nn.BCEWithLogitsLoss` of split tensors; the weights fit the own block."""

    _function = staticmethod(F.binary_cross_entropy_with_logits)
    _options = ("weight", "pos_weight")
    pos_weight: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        weight: Tensor | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> None:
        super().__init__(P_x, weight, reduction)
        self.register_buffer("pos_weight", pos_weight)


class DistributedKLDivLoss(_Loss):
    """`torch.nn.KLDivLoss` of split tensors."""

    _function = staticmethod(F.kl_div)
    _options = ("log_target",)
    _valid_reductions = ("none", "mean", "sum", "batchmean")

    def __init__(self, P_x: Partition, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(P_x, reduction)
        self.log_target = log_target


@dataclass(frozen=True)
class _ClassPlan:
    """Which classes a rank has, and who has the others."""

    count: int
    """Classes of the whole."""
    start: int
    """First own class."""
    comm: Communicator
    """Ranks that hold other positions."""
    class_comm: Communicator
    """Ranks that hold other classes of the same positions."""


class DistributedNLLLoss(PlannedModule[_ClassPlan]):
    """`torch.nn.NLLLoss` of split tensors; dim 1 (the classes) may be split too.

    Args:
        P_x: partition of the input `(N, C, ...)`.
        weight: one weight for each class of the whole.
        ignore_index: target that does not count.
        reduction: "none", "mean" (over the weights of what counts) or "sum".
    """

    weight: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        expect_choice("reduction", reduction, ("none", "mean", "sum"), error=PartitionError)
        self.P_x = P_x
        self.reduction = reduction
        check_dims(type(self).__name__, P_x, 2)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index

    def _make_plan(self, tables: Sequence[Table]) -> _ClassPlan:
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
        start = cuts[1][index[1]] if index is not None else 0
        others = self.P_x.sub(tuple(d for d in range(self.P_x.dim) if d != 1)).comm
        return _ClassPlan(cuts[1][-1], start, others, self.P_x.sub(1).comm)

    def _normaliser(self, x: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the logarithm to subtract at each position, a value all class ranks share."""
        return None

    def _read(self, input: tuple[Any, ...]) -> Any:
        structures, gradients, problem = super()._read(input)
        if problem is None and len(input) > 1 and self.P_x.active:
            # Where classes are split, their number is known once ranks have met: see `forward`.
            classes = input[0].shape[1] if self.P_x.shape[1] == 1 and input[0].dim() > 1 else None
            problem = self._stray_target(input[1], classes)
        return structures, gradients, problem

    def _stray_target(self, target: Tensor, classes: int | None) -> UnisonoError | None:
        """Return the error for a target outside the classes, if there is one."""
        if target.dtype.is_floating_point or target.is_meta:
            return None
        if not target.numel():
            return None
        low, high = target.masked_fill(target == self.ignore_index, 0).aminmax()
        if is_accelerator(target.device):  # where the host does not wait: told as torch's own loss
            is_class = low >= 0 if classes is None else (low >= 0) & (high < classes)
            private.assert_async(is_class, f"targets that are none of the {classes} classes")
            return None
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
        if not self._takes_part:
            return self._outside(input).sum()
        if self.P_x.shape[1] > 1 and (stray := self._stray_target(target, self._plan.count)):
            raise stray
        tied = self._tied(input)
        losses, weights = self._positions(tied, target, self._normaliser(tied))
        is_cast = torch.is_autocast_enabled(input.device.type)  # then torch's losses are in float32
        dtype = wide(input[:0]).dtype if is_cast else input.dtype
        if self.reduction == "none":
            return losses.to(dtype)
        comm = self._plan.comm
        total = sum_to_replicated(losses.sum(dtype=sum_dtype(losses)), comm=comm)
        if self.reduction == "mean":
            total = total / comm.all_reduce(weights.sum(dtype=sum_dtype(weights)))
        return total.to(dtype)

    def _positions(
        self, x: Tensor, target: Tensor, normaliser: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return loss and weight of each position, equal on all ranks that share it."""
        picked = self._picked(-x, target, self._plan.start)
        if normaliser is not None:
            picked = picked + normaliser
        weights = label_weights(target, self.weight, self.ignore_index, picked)
        return torch.where(weights != 0, picked * weights, torch.zeros_like(picked)), weights

    def _picked(self, values: Tensor, target: Tensor, start: int) -> Tensor:
        """Return the value at the target class, from the rank that holds it."""
        here = (target >= start) & (target < start + values.shape[1])
        if values.shape[1] == 0:
            own = values.sum(1)
        else:
            local = (target - start).clamp(0, values.shape[1] - 1)
            own = values.gather(1, local.unsqueeze(1)).squeeze(1)
            own = torch.where(here, own, torch.zeros_like(own))
        return sum_to_replicated(own, comm=self._plan.class_comm)


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
                f"label_smoothing={label_smoothing}", None, f"not 0 <= {label_smoothing} <= 1"
            )
        self.label_smoothing = label_smoothing

    def _normaliser(self, x: Tensor) -> Tensor:
        x = wide(x)
        classes = self._plan.class_comm
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
        x = wide(x)
        start, classes = self._plan.start, self._plan.count
        every = x.new_ones(classes) if self.weight is None else self.weight.to(x)
        own = every[start : start + x.shape[1]].reshape(1, -1, *(1,) * (x.dim() - 2))
        spread = sum_to_replicated((-x * own).sum(1), comm=self._plan.class_comm)
        spread = (spread + every.sum() * normaliser) * (target != self.ignore_index)
        smooth = self.label_smoothing
        return (1 - smooth) * losses + smooth / classes * spread, weights

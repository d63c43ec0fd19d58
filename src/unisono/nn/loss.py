"""Losses of split tensors: the value of the whole, on every rank.

Each rank calls `backward()` once and gets the gradient of its own block, as one process would.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.nn.planned import PlannedModule
from unisono.nn.riding import summed_with_word
from unisono.nn.structure import Table
from unisono.operators import SumToReplicated, sum_to_replicated
from unisono.operators.plans import GroupPlan
from unisono.topology import Partition

__all__ = [
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedMSELoss",
    "DistributedPoissonNLLLoss",
]


class _Loss(PlannedModule[tuple[int, int]]):
    """A loss that is a sum over elements; the plan is (number of elements, batch size)."""

    _word_travels = "inside"
    _valid_reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")

    def __init__(self, P_x: Partition, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in self._valid_reductions:
            raise PartitionError.because(
                f"{type(self).__name__}(reduction={reduction!r})",
                f"reductions: {', '.join(map(repr, self._valid_reductions))}",
                None,
                'reduction="mean"',
            )
        self.P_x = P_x
        self.reduction = reduction

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, self.reduction, *self._options())

    def _options(self) -> tuple[object, ...]:
        """Return further arguments that must be equal on all ranks."""
        return ()

    def _make_plan(self, tables: Sequence[Table]) -> tuple[int, int]:
        shape = tables[0].global_shape(self.P_x)
        for table in tables:
            table.dtype(self.P_x)
            if table.cuts(self.P_x) != tables[0].cuts(self.P_x):
                raise PartitionError.because(
                    type(self).__name__,
                    f"input of {list(shape)}, target of {list(table.global_shape(self.P_x))}",
                    "their blocks differ",
                    "cut the target like the input",
                )
        return torch.Size(shape).numel(), shape[0] if shape else 1

    def _elements(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each element."""
        raise TypeError(f"{type(self).__name__} has no loss for {x.shape}, {target.shape}")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of the whole tensors; with reduction "none" that of the own block."""
        x = input
        if not self._takes_part:
            return self._outside(x).sum()
        if self.reduction == "none":
            self._answer_first((x, target))
            return self._elements(self._tied(x), target)
        total, dtype = self._total(x, target)
        count, batch = self._plan
        if self.reduction != "sum":
            total = total / (count if self.reduction == "mean" else batch)
        return total.to(dtype)

    def _total(self, x: Tensor, target: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the sum over all elements, and their dtype; the word travels with it.

        The sum counts once. That of 16-bit elements is in float32, where their mean may be finite.
        """
        comm = self.P_x.comm
        question = self._take_question()
        if question is None:
            elements = self._elements(self._tied(x), target)
            return sum_to_replicated(summed(elements), comm=comm), elements.dtype
        # A rank that stands in cannot know the dtype of the others' sums; this one all know.
        wide = _sum_dtype(*(structure.dtype for structure in self._structures))
        fits = not question.stands_in
        elements = self._elements(x, target) if fits else torch.zeros((), device=x.device)
        own = summed(elements)
        total, heard = summed_with_word(own.to(wide), comm, question.word)
        if self._heeded(question.settle(heard), (x, target)):
            return self._total(x, target)
        plan = GroupPlan(comm, landed=total.to(own.dtype))
        return SumToReplicated.apply(self._tied(own), plan), elements.dtype


def summed(elements: Tensor) -> Tensor:
    """Return the sum of elements, of 16-bit ones in float32."""
    is_short = elements.dtype in (torch.float16, torch.bfloat16)
    return elements.sum(dtype=torch.float32 if is_short else None)


def _sum_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the real dtype that holds sums over elements of all these, and counts of ranks."""
    joint = functools.reduce(torch.promote_types, dtypes)
    real = torch.zeros((), dtype=joint).abs().sum().dtype
    return torch.float32 if real.itemsize == 2 else real


class DistributedL1Loss(_Loss):
    """`torch.nn.L1Loss` of split tensors."""

    def _elements(self, x: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(x, target, reduction="none")


class DistributedMSELoss(_Loss):
    """`torch.nn.MSELoss` of split tensors."""

    def _elements(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(x, target, reduction="none")


class DistributedPoissonNLLLoss(_Loss):
    """`torch.nn.PoissonNLLLoss` of split tensors."""

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

    def _options(self) -> tuple[object, ...]:
        return (self.log_input, self.full, self.eps)

    def _elements(self, x: Tensor, target: Tensor) -> Tensor:
        return F.poisson_nll_loss(
            x, target, log_input=self.log_input, full=self.full, eps=self.eps, reduction="none"
        )


class WeightedLoss(_Loss):
    """A loss with a weight that is broadcast over the own block."""

    weight: Tensor | None

    def __init__(
        self, P_x: Partition, weight: Tensor | None = None, reduction: str = "mean"
    ) -> None:
        super().__init__(P_x, reduction)
        self.register_buffer("weight", weight)

    def _options(self) -> tuple[object, ...]:
        return (self.weight is None,)


class DistributedBCELoss(WeightedLoss):
    """`torch.nn.BCELoss` of split tensors; `weight` fits the own block."""

    def _elements(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, target, self.weight, reduction="none")


class DistributedBCEWithLogitsLoss(WeightedLoss):
    """`torch.nn.BCEWithLogitsLoss` of split tensors; the weights fit the own block."""

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

    def _elements(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            x, target, self.weight, reduction="none", pos_weight=self.pos_weight
        )


class DistributedKLDivLoss(_Loss):
    """`torch.nn.KLDivLoss` of split tensors."""

    _valid_reductions = ("none", "mean", "sum", "batchmean")

    def __init__(self, P_x: Partition, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(P_x, reduction)
        self.log_target = log_target

    def _options(self) -> tuple[object, ...]:
        return (self.log_target,)

    def _elements(self, x: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(x, target, reduction="none", log_target=self.log_target)

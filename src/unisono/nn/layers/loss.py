"""Losses of split tensors: the value of the whole, on every rank.

Each rank calls `backward()` once and gets the gradient of its own block, as one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.expect import expect_choice
from unisono.nn.agreement import Table
from unisono.nn.layers.function_layer import FunctionLayer, FunctionPlan
from unisono.nn.planned import check_dims
from unisono.nn.precision import wide, wide_dtype
from unisono.nn.split_tensors.pointwise import stray_label
from unisono.nn.split_tensors.tensor import Split
from unisono.topology import Partition


class _Loss(FunctionLayer):
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
                options[name] = self._shown(value.expand_as(input))
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


class DistributedNLLLoss(FunctionLayer):
    """`torch.nn.NLLLoss` of split tensors; dim 1 (the classes) may be split too.

    Args:
        P_x: partition of the input `(N, C, ...)`.
        weight: one weight for each class of the whole.
        ignore_index: target that does not count.
        reduction: "none", "mean" (over the weights of what counts) or "sum".
    """

    _balances = False
    _function: ClassVar[Callable[..., Tensor]] = staticmethod(F.nll_loss)
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

    def _make_plan(self, tables: Sequence[Table]) -> FunctionPlan:
        for rank in self.P_x.ranks:
            shape, target = (table.of(rank).shape for table in tables)
            if (shape[0], *shape[2:]) != target:
                raise PartitionError.because(
                    type(self).__name__,
                    f"rank {rank}: input of {list(shape)}, target of {list(target)}",
                    f"{[shape[0], *shape[2:]]} != {list(target)}",
                    "the target has the input's blocks without the class dim",
                )
        return super()._make_plan(tables[:1])

    def _read(self, input: tuple[Any, ...]) -> Any:
        structures, gradients, problem = super()._read(input)
        if problem is None and len(input) > 1 and self.P_x.active:
            # Where classes are split, their number is known to the rule alone.
            classes = input[0].shape[1] if self.P_x.shape[1] == 1 and input[0].dim() > 1 else None
            problem = stray_label(input[1], classes, self.ignore_index)
        return structures, gradients, problem

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of the whole tensors; with reduction "none" one value a position."""
        if not self._takes_part:
            return self._outside(input).sum()
        plan = self._plan
        cuts = {max(dim - 1, 0): cut for dim, cut in plan.cuts.items() if dim != 1}
        loss = self._called(
            self._function,
            wide(self._tied(input)),
            target=Split(target, cuts, plan.run) if cuts else target,
            weight=None if self.weight is None else self.weight.to(wide_dtype(input.dtype)),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            **self._further(),
        )
        is_cast = torch.is_autocast_enabled(input.device.type)  # then torch's losses are in float32
        return loss if is_cast else loss.to(input.dtype)

    def _further(self) -> dict[str, float]:
        """Return arguments that only some of torch's class losses take."""
        return {}


class DistributedCrossEntropyLoss(DistributedNLLLoss):
    """`torch.nn.CrossEntropyLoss` of split tensors; dim 1 (the classes) may be split too.

    Arguments as `DistributedNLLLoss`; `label_smoothing` as in torch.
    """

    _function = staticmethod(F.cross_entropy)

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

    def _further(self) -> dict[str, float]:
        return {"label_smoothing": self.label_smoothing}

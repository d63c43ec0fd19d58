"""The regions in gp_utils' spelling: functions, and the autograd Functions of that page.

The functions are the regions of `regions.py`, `dim=-1` by default. The Function classes are for
code that calls `Class.apply` itself; their backwards are recorded too, so higher derivatives work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unisono.graph_parallel import regions
from unisono.graph_parallel.groups import current_gp
from unisono.graph_parallel.layout import is_following
from unisono.graph_parallel.padding import split_tensor
from unisono.operators import (
    AllGather,
    ConcatReplicated,
    Copy,
    LinearMap,
    ReduceScatter,
    SliceReplicated,
    SumToReplicated,
)
from unisono.operators.plans import GroupPlan, block_plan, whole_plan


def copy_to_model_parallel_region(input: Tensor) -> Tensor:
    """Return `input`; its gradient is summed over the row."""
    return regions.copy(input)


def reduce_from_model_parallel_region(input: Tensor) -> Tensor:
    """Return the sum over the row; its gradient passes unchanged."""
    return regions.reduce(input, grad="identity")


def scatter_to_model_parallel_region(
    input: Tensor, dim: int = -1, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return the own block along `dim`; its gradient is gathered."""
    return regions.scatter(input, dim, sizes=sizes)


def gather_from_model_parallel_region(
    input: Tensor,
    dim: int = -1,
    *,
    sizes: Sequence[int] | None = None,
    natoms: int | None = None,
) -> Tensor:
    """Return all blocks joined along `dim`; each rank takes its own block of the gradient."""
    return regions.gather(input, dim, grad="slice", sizes=sizes, natoms=natoms)


def gather_from_model_parallel_region_sum_grad(
    input: Tensor,
    dim: int = -1,
    *,
    sizes: Sequence[int] | None = None,
    natoms: int | None = None,
) -> Tensor:
    """Return all blocks joined along `dim`; gradients are summed over ranks."""
    return regions.gather(input, dim, grad="sum", sizes=sizes, natoms=natoms)


def scale_backward_grad(input: Tensor) -> Tensor:
    """Return `input`; its gradient is multiplied by the ranks of the row.

    For DDP over the world, which divides by dp * gp where only dp is meant. Right for parameters
    of the partitioned part of a model only: gradients of replicated ones become gp times too big.
    """
    return _ScaledBackward.apply(input, GroupPlan(regions.row(None)))


def reduce_scatter_to_model_parallel_region(
    input: Tensor, dim: int = -1, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return the own block along `dim` of the sum over the row; its gradient is gathered."""
    return regions.reduce_scatter(input, dim, sizes=sizes)


class _Times(LinearMap):
    """Multiply by the number of ranks; its own adjoint."""

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:
        """See `LinearMap`."""
        return x * plan.comm.size


_Times.adjoint = _Times


class _ScaledBackward(LinearMap):
    """The identity, with a backward that multiplies: not an adjoint, but a correction."""

    adjoint = _Times

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:  # noqa: ARG004
        """See `LinearMap`."""
        return x.view_as(x)


class _Region(torch.autograd.Function):
    """A region as a plain Function: the map forward, the Function of its adjoint backward."""

    region: ClassVar[Any]
    """The function of the same name."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Apply the region: under a layout check and in `torch.func` by its function."""
        if is_following() or torch._C._are_functorch_transforms_active():
            return cls.region(*args, **kwargs)
        return super().apply(*args, **kwargs)

    @staticmethod
    def run(ctx: Any, kind: type[LinearMap], input: Tensor, plan: Any) -> Tensor:
        """Apply the kernel and keep what the backward needs."""
        ctx.kind, ctx.plan = kind, plan
        return input.view_as(input) if plan.comm.size == 1 else kind.kernel(input, plan)

    @staticmethod
    def back(ctx: Any, grad: Tensor) -> Tensor:
        """Apply the adjoint, recorded."""
        if ctx.plan.comm.size == 1:
            return grad
        return ctx.kind.adjoint.apply_in_backward(grad, ctx.plan.adjoint)


class CopyToModelParallelRegion(_Region):
    """Identity forward, sum over the row backward."""

    region = staticmethod(copy_to_model_parallel_region)

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Return `input`."""
        return _Region.run(ctx, Copy, input, GroupPlan(current_gp()))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        """Return the summed gradient."""
        return _Region.back(ctx, grad_output)


class ReduceFromModelParallelRegion(_Region):
    """Sum over the row forward, identity backward."""

    region = staticmethod(reduce_from_model_parallel_region)

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Return the sum."""
        return _Region.run(ctx, SumToReplicated, input, GroupPlan(current_gp()))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient."""
        return _Region.back(ctx, grad_output)


class ScatterToModelParallelRegion(_Region):
    """Own block forward, gather backward."""

    region = staticmethod(scatter_to_model_parallel_region)

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Return the own block."""
        plan = whole_plan(input, dim, None, current_gp(), "scatter")
        return _Region.run(ctx, SliceReplicated, input, plan)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the joined gradients."""
        return _Region.back(ctx, grad_output), None


class GatherFromModelParallelRegion(_Region):
    """Joined blocks forward, own block backward."""

    region = staticmethod(gather_from_model_parallel_region)

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Return the joined blocks."""
        plan = block_plan(input, dim, None, current_gp(), "gather")
        return _Region.run(ctx, ConcatReplicated, input, plan)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the own block."""
        return _Region.back(ctx, grad_output), None


class GatherFromModelParallelRegionSumGrad(_Region):
    """Joined blocks forward, own block of the summed gradients backward."""

    region = staticmethod(gather_from_model_parallel_region_sum_grad)

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Return the joined blocks."""
        plan = block_plan(input, dim, None, current_gp(), "gather")
        return _Region.run(ctx, AllGather, input, plan)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the own block of the sum."""
        return _Region.back(ctx, grad_output), None


class ScaleBackwardGrad(_Region):
    """Identity forward, gradient times the ranks of the row backward."""

    region = staticmethod(scale_backward_grad)

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """Return `input`."""
        ctx.ranks = current_gp().size
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # type: ignore[override]
        """Return the scaled gradient."""
        return grad_output * ctx.ranks


class ReduceScatterToModelParallelRegion(_Region):
    """Own block of the sum forward, gather with summed gradients backward."""

    region = staticmethod(reduce_scatter_to_model_parallel_region)

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        """Return the own block of the sum."""
        plan = whole_plan(input, dim, None, current_gp(), "reduce_scatter")
        return _Region.run(ctx, ReduceScatter, input, plan)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the joined gradients."""
        return _Region.back(ctx, grad_output), None


def summed(ctx: Any, input: Tensor) -> Tensor:  # noqa: ARG001
    """Return the sum over the row, a new tensor without gradient; `ctx` is not looked at."""
    return current_gp().all_reduce(input)


def own_block(input: Tensor, dim: int = -1) -> Tensor:
    """Return a copy of the own balanced block along `dim`."""
    comm = current_gp()
    block = split_tensor(input, comm.size, dim)[comm.rank]
    return block.clone(memory_format=torch.contiguous_format)


def joined(input: Tensor, dim: int = -1) -> Tensor:
    """Return the blocks of all ranks joined along `dim`, without gradient; sizes may differ."""
    return current_gp().all_gather(input, dim)

"""The regions of `regions.py` in gp_utils' spelling: `dim=-1` by default."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.graph_parallel import regions
from unisono.operators import LinearMap
from unisono.operators.plans import GroupPlan


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
    return ScaledBackward.apply(input, GroupPlan(regions.row(None)))


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


class ScaledBackward(LinearMap):
    """The identity, with a backward that multiplies: not an adjoint, but a correction."""

    adjoint = _Times

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:  # noqa: ARG004
        """See `LinearMap`."""
        return x.view_as(x)

"""Into and out of work that a row of ranks shares: copy, reduce, scatter, gather, reduce_scatter.

Each is an operator of `unisono.operators` on the current row of ranks: out of place, along any dim,
with uneven and empty blocks, and derivatives of every order. Who uses a gathered or summed tensor
decides what its gradients on the ranks are: equal copies of one gradient (R), or terms of a sum
(P). Nothing in the data tells which, so `grad` has no default. Last, the same regions in gp_utils'
spelling, with `dim=-1` by default.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from unisono import operators
from unisono.comm import Communicator
from unisono.comm.arguments import whole_numbers
from unisono.comm.health import check as checking
from unisono.errors import PartitionError, UnisonoError, an
from unisono.expect import is_integer
from unisono.graph_parallel import layout
from unisono.graph_parallel.groups import current_gp
from unisono.graph_parallel.layout import watched
from unisono.operators import LinearMap
from unisono.operators.plans import GroupPlan
from unisono.topology.decompose import split_sizes

MISSING: Any = None
"""The `grad` of a region that was told nothing; refused, with an explanation."""

_GATHERS = {"slice": operators.concat_replicated, "sum": operators.all_gather}
_REDUCES = {"identity": operators.sum_to_replicated, "sum": operators.all_sum_reduce}


def copy(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """Return `x`, which all ranks hold equal; its gradient is the sum over ranks.

    R -> I. Local forward, collective backward.
    """
    return watched("copy", x, operators.copy, comm=row(comm))


def reduce(
    x: Tensor, *, grad: Literal["identity", "sum"] = MISSING, comm: Communicator | None = None
) -> Tensor:
    """Return the sum of `x` over ranks. Collective.

    `grad="identity"` (I -> R): all ranks use the sum alike. `grad="sum"` (I -> I): each uses it for
    its own share of the work, so gradients are summed as well.
    """
    if not isinstance(grad, str) or grad not in _REDUCES:
        raise _unclear("reduce", grad, "identity", "the sum alike (an energy, a loss)")
    return watched(f"reduce {grad}", x, _REDUCES[grad], comm=row(comm))


def scatter(
    x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, comm: Communicator | None = None
) -> Tensor:
    """Return this rank's block along `dim` of `x`, which all ranks hold equal.

    R -> S. Local forward; the backward joins the blocks' gradients (collective). Blocks are
    balanced, or as `sizes` says.
    """
    move = operators.slice_replicated
    return watched("scatter", x, move, dim, sizes, comm=row(comm), dim=dim)


def gather(
    x: Tensor,
    dim: int = 0,
    *,
    grad: Literal["slice", "sum"] = MISSING,
    sizes: Sequence[int] | None = None,
    natoms: int | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return the blocks of all ranks joined along `dim`. Collective.

    Args:
        x: this rank's block; blocks may differ along `dim` and may be empty.
        dim: along which they are joined.
        grad: `"slice"` (S -> R): all ranks use the result alike, each takes its own block of the
            gradient. `"sum"` (S -> I): each rank uses it for its own nodes or edges, gradients are
            summed over ranks.
        sizes: length of each rank's block, known to all; nothing has to be exchanged then.
        natoms: the same for the balanced split of `natoms` rows.
        comm: the ranks; default the current row.
    """
    if not isinstance(grad, str) or grad not in _GATHERS:
        raise _unclear("gather", grad, "slice", "the result alike (a loss of everything)")
    comm = current_gp() if comm is None else comm
    if sizes is not None or natoms is not None:
        sizes = _known_sizes(x, dim, sizes, natoms, comm)
    move = _GATHERS[grad]
    if layout.follower is None:  # a small gather takes little longer than a call
        return move(x, dim, sizes, comm=comm)
    return watched(f"gather {grad}", x, move, dim, sizes, comm=comm, dim=dim)


def reduce_scatter(
    x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, comm: Communicator | None = None
) -> Tensor:
    """Return this rank's block along `dim` of the sum over ranks, in one collective.

    I -> S. `x` has the same shape everywhere; blocks are balanced, or as `sizes` says.
    """
    move = operators.reduce_scatter
    return watched("reduce_scatter", x, move, dim, sizes, comm=row(comm), dim=dim)


def all_to_all(
    x: Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    *,
    comm: Communicator | None = None,
) -> Tensor:
    """Send `send_sizes[q]` rows to each rank q, in order; return the rows received. S -> S."""
    return operators.all_to_all(x, send_sizes, recv_sizes, comm=row(comm))


def row(comm: Communicator | None) -> Communicator:
    """Return `comm`, or the current row of ranks."""
    return current_gp() if comm is None else comm


def _unclear(verb: str, grad: object, alike: str, use: str) -> UnisonoError:
    """Return the error of a region whose gradient has no meaning yet."""
    return PartitionError.because(
        f"{verb}(grad={grad!r})",
        "what the gradient means depends on who uses the result",
        f'R: all ranks use {use}: grad="{alike}"\n'
        'P: each rank uses it for its own share of the work (a layer): grad="sum"',
        f'{verb}(x, grad="{alike}") where a loss follows, grad="sum" inside a layer',
    )


def _known_sizes(
    x: Tensor, dim: int, sizes: Sequence[int] | None, natoms: int | None, comm: Communicator
) -> Sequence[int]:
    """Return the block lengths that the caller told.

    In check mode ranks first compare what they were told, so that a wrong entry of one rank is an
    error on all of them instead of a wait.
    """
    if sizes is not None and natoms is not None:
        raise PartitionError.because(
            f"gather(sizes={sizes!r}, natoms={natoms})",
            "two answers to one question",
            None,
            "sizes=[...] for any blocks, natoms=N for the balanced split of N",
        )
    if sizes is None:
        try:
            sizes = split_sizes(operator.index(natoms), comm.size)  # type: ignore[arg-type]
        except TypeError:
            raise PartitionError.because(
                f"gather(natoms={natoms!r})",
                f"{an(type(natoms).__name__)}, no number of rows",
                None,
                "natoms=len(pos): the rows of all ranks together",
            ) from None
    if comm.size > 1 and checking.active:
        is_dim = is_integer(dim) and -x.dim() <= dim < x.dim()
        listed = whole_numbers(sizes) or ()
        told = listed[comm.rank] if comm.rank < len(listed) else -1
        mine = [len(listed), told, x.shape[dim] if is_dim else -1]
        for rank, (entries, told, found) in enumerate(comm.all_gather_ints(mine)):
            if entries != comm.size or told != found:
                raise PartitionError.because(
                    f"gather along dim {dim!r} with sizes {sizes!r}",
                    f"rank {rank} of {comm.size} brings {found} rows and has {entries} entries",
                    f"sizes[{rank}] = {told} != {found}",
                    "sizes has one entry per rank: the length of its block along dim",
                )
    return sizes


# -- gp_utils' spelling ----------------------------------------------------------------------------


def copy_to_model_parallel_region(input: Tensor) -> Tensor:
    """Return `input`; its gradient is summed over the row."""
    return copy(input)


def reduce_from_model_parallel_region(input: Tensor) -> Tensor:
    """Return the sum over the row; its gradient passes unchanged."""
    return reduce(input, grad="identity")


def scatter_to_model_parallel_region(
    input: Tensor, dim: int = -1, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return the own block along `dim`; its gradient is gathered."""
    return scatter(input, dim, sizes=sizes)


def gather_from_model_parallel_region(
    input: Tensor, dim: int = -1, *, sizes: Sequence[int] | None = None, natoms: int | None = None
) -> Tensor:
    """Return all blocks joined along `dim`; each rank takes its own block of the gradient."""
    return gather(input, dim, grad="slice", sizes=sizes, natoms=natoms)


def gather_from_model_parallel_region_sum_grad(
    input: Tensor, dim: int = -1, *, sizes: Sequence[int] | None = None, natoms: int | None = None
) -> Tensor:
    """Return all blocks joined along `dim`; gradients are summed over ranks."""
    return gather(input, dim, grad="sum", sizes=sizes, natoms=natoms)


def scale_backward_grad(input: Tensor) -> Tensor:
    """Return `input`; its gradient is multiplied by the ranks of the row.

    For DDP over the world, which divides by dp * gp where only dp is meant. Right for parameters
    of the partitioned part of a model only: gradients of replicated ones become gp times too big.
    """
    return ScaledBackward.apply(input, GroupPlan(row(None)))


def reduce_scatter_to_model_parallel_region(
    input: Tensor, dim: int = -1, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Return the own block along `dim` of the sum over the row; its gradient is gathered."""
    return reduce_scatter(input, dim, sizes=sizes)


class _Times(LinearMap):
    """Multiply by the number of ranks; its own adjoint."""

    @staticmethod
    def kernel(x: Tensor, plan: GroupPlan) -> Tensor:
        """Return the product."""
        return x * plan.comm.size


_Times.adjoint = _Times


class ScaledBackward(LinearMap):
    """The identity, with a backward that multiplies: not an adjoint, but a correction."""

    adjoint = _Times
    kernel = staticmethod(operators.Copy.kernel)

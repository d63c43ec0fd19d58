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

import torch
from torch import Tensor

from unisono import operators
from unisono.comm import Communicator
from unisono.comm.arguments import whole_numbers
from unisono.comm.call import call_site
from unisono.comm.health import check as checking
from unisono.errors import LayoutError, PartitionError, UnisonoError, an
from unisono.expect import is_integer
from unisono.graph_parallel.groups import current_gp
from unisono.operators import LinearMap, set_adjoint
from unisono.operators.plans import GroupPlan
from unisono.topology.decompose import split_sizes

MISSING: Any = None
"""The `grad` of a region without one; refused, with an explanation."""
TOLERANCE = 1e-6
"""Largest difference between ranks that check mode accepts, relative to the largest value."""

_GATHERS = {"slice": operators.concat_replicated, "sum": operators.all_gather}
_REDUCES = {"identity": operators.sum_to_replicated, "sum": operators.all_sum_reduce}


def copy(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """Return `x`, which all ranks hold equal; its gradient is the sum over ranks.

    R -> I. Local forward, collective backward.
    """
    comm = row(comm)
    _check_equal("copy", x, comm)
    return operators.copy(x, comm=comm)


def reduce(
    x: Tensor, *, grad: Literal["identity", "sum"] = MISSING, comm: Communicator | None = None
) -> Tensor:
    """Return the sum of `x` over ranks. Collective.

    `grad="identity"` (I -> R): all ranks use the sum alike. `grad="sum"` (I -> I): each uses it for
    its own share of the work, so gradients are summed as well.
    """
    if not isinstance(grad, str) or grad not in _REDUCES:
        raise _unclear("reduce", grad, "identity", "the sum alike (an energy, a loss)")
    comm = row(comm)
    total = _REDUCES[grad](x, comm=comm)
    if grad == "sum" and _is_checked(comm) and total.requires_grad and total.numel() == 1:
        _refuse_equal_gradients(total, comm)
    return total


def scatter(
    x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, comm: Communicator | None = None
) -> Tensor:
    """Return this rank's block along `dim` of `x`, which all ranks hold equal.

    R -> S. Local forward; the backward joins the blocks' gradients (collective). Blocks are
    balanced, or as `sizes` says.
    """
    comm = row(comm)
    _check_equal("scatter", x, comm)
    return operators.slice_replicated(x, dim, sizes, comm=comm)


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
    whole = _GATHERS[grad](x, dim, sizes, comm=comm)
    if grad == "slice" and _is_checked(comm) and whole.requires_grad:
        _compare_gradients(whole, comm)
    return whole


def reduce_scatter(
    x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, comm: Communicator | None = None
) -> Tensor:
    """Return this rank's block along `dim` of the sum over ranks, in one collective.

    I -> S. `x` has the same shape everywhere; blocks are balanced, or as `sizes` says.
    """
    return operators.reduce_scatter(x, dim, sizes, comm=row(comm))


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


def difference_over_ranks(x: Tensor, comm: Communicator) -> str | None:
    """Return in words how far the ranks' tensors are apart, None if they are equal. Collective.

    The same answer on every rank.
    """
    if comm.size == 1 or x.numel() == 0:
        return None
    with torch.no_grad():
        values = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        values = values.double()
        # A difference of two infinities, or with nan, is no number: compare their kinds.
        kinds = values.isposinf() + 2 * values.isneginf() + 3 * values.isnan()
        sent = torch.stack([torch.where(kinds == 0, values, 0.0), kinds.double()])
        highest, lowest = comm.all_reduce(sent, "max"), comm.all_reduce(sent, "min")
        apart = float((highest[0] - lowest[0]).max())
        scale = float(torch.maximum(highest[0].abs(), lowest[0].abs()).max())
        odd = int((highest[1] != lowest[1]).sum())
    if odd:
        return f"{odd} of {values.numel()} values are nan or infinite on some ranks only"
    if apart <= TOLERANCE * scale:
        return None
    return f"values differ by {apart:.3g}, the largest is {scale:.3g}"


def _is_checked(comm: Communicator) -> bool:
    return checking.active and comm.size > 1 and not torch.compiler.is_compiling()


def _check_equal(verb: str, x: Tensor, comm: Communicator) -> None:
    """Raise on all ranks, in check mode, unless they hold the same values."""
    difference = difference_over_ranks(x, comm) if _is_checked(comm) else None
    if difference is not None:
        asked = f"{verb} of a tensor that must be equal on all ranks"
        raise LayoutError.because(asked, difference, None, "reduce it first")


def _compare_gradients(whole: Tensor, comm: Communicator) -> None:
    """Raise in the backward unless the gradients of a gather with `grad="slice"` are equal."""
    site = call_site(2)

    def compare(grad: Tensor) -> None:
        difference = difference_over_ranks(grad, comm)
        if difference is not None:
            raise LayoutError.because(
                f'the gradient of gather(grad="slice") at {site}: it must be equal on all ranks',
                difference,
                None,
                'grad="sum", where each rank uses the result for its own nodes or edges',
            )

    whole.register_hook(compare)


def _refuse_equal_gradients(total: Tensor, comm: Communicator) -> None:
    """Raise in the backward if every rank brings the same gradient of a sum that adds them up.

    Each rank then differentiates its own copy of one number, such as a loss.
    """
    site = call_site(2)

    def compare(grad: Tensor) -> None:
        if bool(grad.any()) and difference_over_ranks(grad, comm) is None:
            raise LayoutError.because(
                f'the gradient of reduce(grad="sum") at {site}',
                f"all {comm.size} ranks bring the same one, {grad.item():.6g}",
                f"they are added up: {comm.size} times too large where all ranks use the sum alike",
                'grad="identity", or the gradient of this rank\'s term alone',
            )

    total.register_hook(compare)


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


set_adjoint(_Times)


class ScaledBackward(LinearMap):
    """The identity, with a backward that multiplies: not an adjoint, but a correction."""

    adjoint = _Times
    kernel = staticmethod(operators.Copy.kernel)

"""Into and out of work that a row of ranks shares: copy, reduce, scatter, gather, reduce_scatter.

Each is an operator of `unisono.operators` on the current row of ranks, with the convention of its
gradient said aloud. All are out of place, work along any dim with uneven and empty blocks, and have
derivatives of every order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from unisono import operators
from unisono.comm import Communicator
from unisono.comm.arguments import whole_numbers
from unisono.comm.health import check as checking
from unisono.errors import PartitionError, an
from unisono.graph_parallel.conventions import MISSING, check_grad
from unisono.graph_parallel.groups import current_gp
from unisono.graph_parallel.layout import watched
from unisono.topology.decompose import split_sizes


def copy(x: Tensor, *, comm: Communicator | None = None) -> Tensor:
    """Return `x`, which all ranks hold equal; its gradient is the sum over ranks.

    R -> I. Local forward, collective backward.
    """
    comm = row(comm)
    return watched("copy", x, lambda t: operators.copy(t, comm=comm), comm)


def reduce(
    x: Tensor,
    *,
    grad: Literal["identity", "sum"] = MISSING,
    comm: Communicator | None = None,
) -> Tensor:
    """Return the sum of `x` over ranks. Collective.

    `grad="identity"` (I -> R): all ranks use the sum alike. `grad="sum"` (I -> I): each uses it for
    its own share of the work, so gradients are summed as well.
    """
    kind = check_grad(grad, "reduce")
    comm = row(comm)
    move = operators.sum_to_replicated if kind == "identity" else operators.all_sum_reduce
    return watched("reduce", x, lambda t: move(t, comm=comm), comm)


def scatter(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return this rank's block along `dim` of `x`, which all ranks hold equal.

    R -> S. Local forward; the backward joins the blocks' gradients (collective). Blocks are
    balanced, or as `sizes` says.
    """
    comm = row(comm)
    return watched(
        "scatter", x, lambda t: operators.slice_replicated(t, dim, sizes, comm=comm), comm, dim
    )


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
    kind = check_grad(grad, "gather")
    comm = row(comm)
    known = known_sizes(x, dim, sizes, natoms, comm)
    move = operators.concat_replicated if kind == "slice" else operators.all_gather
    return watched(f"gather {kind}", x, lambda t: move(t, dim, known, comm=comm), comm, dim)


def reduce_scatter(
    x: Tensor,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return this rank's block along `dim` of the sum over ranks, in one collective.

    I -> S. `x` has the same shape everywhere; blocks are balanced, or as `sizes` says.
    """
    comm = row(comm)
    return watched(
        "reduce_scatter", x, lambda t: operators.reduce_scatter(t, dim, sizes, comm=comm), comm, dim
    )


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


def known_sizes(
    x: Tensor,
    dim: int,
    sizes: Sequence[int] | None,
    natoms: int | None,
    comm: Communicator,
) -> Sequence[int] | None:
    """Return the block lengths that the caller told, None if they must be learned.

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
    if natoms is not None:
        sizes = split_sizes(_count(natoms), comm.size)
    if sizes is not None and comm.size > 1 and checking.active:
        _compare(x, dim, sizes, comm)
    return sizes


def _count(natoms: object) -> int:
    try:
        return operator.index(natoms)  # type: ignore[arg-type]
    except TypeError:
        raise PartitionError.because(
            f"gather(natoms={natoms!r})",
            f"{an(type(natoms).__name__)}, no number of rows",
            None,
            "natoms=len(pos): the rows of all ranks together",
        ) from None


def _compare(x: Tensor, dim: int, sizes: Sequence[int], comm: Communicator) -> None:
    is_dim = isinstance(dim, int) and -x.dim() <= dim < x.dim()
    own = x.shape[dim] if is_dim else -1
    listed = whole_numbers(sizes) or ()
    mine = [len(listed), listed[comm.rank] if comm.rank < len(listed) else -1, own]
    for rank, (entries, told, found) in enumerate(comm.all_gather_ints(mine)):
        if entries != comm.size or told != found:
            raise PartitionError.because(
                f"gather along dim {dim!r} with sizes {sizes!r}",
                f"rank {rank} of {comm.size} brings {found} rows and has {entries} entries",
                f"sizes[{rank}] = {told} != {found}",
                "sizes has one entry a rank: the length of its block along dim",
            )

"""The adjoint table: each operator, its adjoint, its spaces, and an example to test it with.

Docs print it; the dot-product, gradient and second-gradient tests run over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.operators.all_gather import AllGather, ReduceScatter, all_gather, reduce_scatter
from unisono.operators.all_reduce import AllSumReduce, all_sum_reduce
from unisono.operators.all_to_all import AllToAll, all_to_all
from unisono.operators.halo import HaloAdd, HaloExchange, halo_add, halo_exchange
from unisono.operators.linear import LinearMap
from unisono.operators.message import Recv, Send, recv, send
from unisono.operators.permute import Permute, permute
from unisono.operators.repartition import Repartition, repartition
from unisono.operators.replicate import Copy, SumToReplicated, copy, sum_to_replicated
from unisono.operators.root import Broadcast, SumReduce, broadcast, sum_reduce
from unisono.operators.rows import AddRows, AllGatherRows, add_rows, all_gather_rows
from unisono.operators.scatter import Gather, Scatter, gather, scatter
from unisono.operators.slice import (
    ConcatReplicated,
    SliceReplicated,
    concat_replicated,
    slice_replicated,
)
from unisono.topology import RowPlan, decompose, halo, overlap

Map = Callable[[Tensor], Tensor]
MakeTensor = Callable[..., Tensor]


@dataclass(frozen=True)
class Example:
    """One case of an operator on this rank: the two maps and a point of each space.

    The points may have no elements on ranks that hold nothing.
    """

    forward: Map
    adjoint: Map
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Pair:
    """A linear operator and its adjoint."""

    name: str
    """Name of the function."""
    adjoint_name: str
    """Name of the adjoint's function."""
    forward: type[LinearMap]
    """Its autograd Function."""
    adjoint: type[LinearMap]
    """The adjoint's autograd Function."""
    domain: str
    """Space of the input: R replicated, S sharded, I each rank's own."""
    range: str
    """Space of the output."""
    example: Callable[[Communicator, Sequence[int], MakeTensor], Example]
    """`example(comm, lengths, make)`: a case with `lengths[r]` rows on rank r; `make(*shape)` draws
    a tensor of this rank, `make(*shape, same=True)` one that is equal on all ranks."""


def _same_shape(forward: Map, adjoint: Map, make: MakeTensor, rows: int, spaces: str) -> Example:
    return Example(
        forward,
        adjoint,
        make(rows, 2, same=spaces[0] == "R"),
        make(rows, 2, same=spaces[1] == "R"),
    )


def _all_sum_reduce(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    run = lambda t: all_sum_reduce(t, comm=comm)  # noqa: E731
    return _same_shape(run, run, make, lengths[0], "II")


def _copy(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    return _same_shape(
        lambda t: copy(t, comm=comm),
        lambda t: sum_to_replicated(t, comm=comm),
        make,
        lengths[0],
        "RI",
    )


def _broadcast(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    root, shape = comm.size - 1, (lengths[0], 2)
    like = (shape, make(0).dtype)
    mine = shape if comm.rank == root else (0,)
    return Example(
        lambda t: broadcast(t, root, like=like, comm=comm),
        lambda t: sum_reduce(t, root, comm=comm),
        make(*mine),
        make(*shape),
    )


def _scatter(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    root, total = comm.size - 1, sum(lengths)
    whole = (3, total) if comm.rank == root else (0,)
    return Example(
        lambda t: scatter(t, root, 1, lengths, comm=comm),
        lambda t: gather(t, root, 1, lengths, comm=comm),
        make(*whole),
        make(3, lengths[comm.rank]),
    )


def _slice_replicated(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    return Example(
        lambda t: slice_replicated(t, 1, lengths, comm=comm),
        lambda t: concat_replicated(t, 1, lengths, comm=comm),
        make(2, sum(lengths), same=True),
        make(2, lengths[comm.rank]),
    )


def _all_gather(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    return Example(
        lambda t: all_gather(t, -1, lengths, comm=comm),
        lambda t: reduce_scatter(t, -1, lengths, comm=comm),
        make(2, lengths[comm.rank]),
        make(2, sum(lengths)),
    )


def _all_to_all(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    size = comm.size
    counts = [[lengths[(r + 2 * q) % size] for q in range(size)] for r in range(size)]
    send_sizes = counts[comm.rank]
    recv_sizes = [counts[r][comm.rank] for r in range(size)]
    return Example(
        lambda t: all_to_all(t, send_sizes, recv_sizes, comm=comm),
        lambda t: all_to_all(t, recv_sizes, send_sizes, comm=comm),
        make(sum(send_sizes), 2),
        make(sum(recv_sizes), 2),
    )


def _permute(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    size = comm.size
    return Example(
        lambda t: permute(t, lambda r: (r + 1) % size, comm=comm),
        lambda t: permute(t, lambda r: (r - 1) % size, comm=comm),
        make(lengths[comm.rank], 2),
        make(lengths[comm.rank - 1], 2),
    )


def _send(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """Rank 0 sends to the last rank; ranks between them, and a rank alone, do nothing."""
    shape, nothing = (lengths[0], 2), make(0)
    first, last = 0, comm.size - 1
    arriving = (shape, nothing.dtype)

    def from_first(t: Tensor) -> Tensor:
        if first == last:
            return t.view_as(t)
        if comm.rank == first:
            return send(t, last, comm=comm)
        return recv(arriving, first, token=t, comm=comm) if comm.rank == last else t * 1

    def from_last(t: Tensor) -> Tensor:
        if first == last:
            return t.view_as(t)
        if comm.rank == last:
            return send(t, first, comm=comm)
        return recv(arriving, last, token=t, comm=comm) if comm.rank == first else t * 1

    x = make(*shape) if comm.rank == first else nothing
    y = make(*shape) if comm.rank == last else nothing
    return Example(from_first, from_last, x, y)


def _rows(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """Every rank needs the first and last row of every other one."""
    wanted = [[] if n == 0 else sorted({0, n - 1}) for n in lengths]
    me, others = comm.rank, [q != comm.rank for q in range(comm.size)]
    plan = RowPlan(
        num_rows=lengths[me],
        send_index=torch.tensor(
            [row for other in others if other for row in wanted[me]], dtype=torch.int64
        ),
        send_sizes=tuple(len(wanted[me]) if other else 0 for other in others),
        recv_sizes=tuple(len(wanted[q]) if other else 0 for q, other in enumerate(others)),
    )
    return Example(
        lambda t: all_gather_rows(t, plan, comm=comm),
        lambda t: add_rows(t, plan, comm=comm),
        make(lengths[me], 2),
        make(sum(plan.recv_sizes), 2),
    )


def _halo(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """A kernel of 3 with two points of padding before and one after."""
    cuts = [decompose.bounds(lengths), (0, 2)]
    plan = halo.plan(cuts, (comm.rank, 0), (3, 1), padding=((2, 1), (0, 0)))
    return Example(
        lambda t: halo_exchange(t, plan, comm=comm),
        lambda t: halo_add(t, plan, comm=comm),
        make(*plan.block_shape),
        make(*plan.window_shape),
    )


def _repartition(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """Rows to columns, the ranks in descending order."""
    rows = [decompose.bounds(lengths), (0, 3)]
    columns = [(0, sum(lengths)), decompose.split_cuts(3, comm.size)]
    ranks = range(comm.size)
    plan = overlap.overlaps(rows, ranks, columns, ranks[::-1], comm.rank)
    back = plan.adjoint
    return Example(
        lambda t: repartition(t, plan, comm=comm),
        lambda t: repartition(t, back, comm=comm),
        make(*(plan.source_shape or ())),
        make(*(plan.dest_shape or ())),
    )


def _reversed(
    make_example: Callable[[Communicator, Sequence[int], MakeTensor], Example],
) -> Callable[[Communicator, Sequence[int], MakeTensor], Example]:
    def swapped(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
        case = make_example(comm, lengths, make)
        return Example(case.adjoint, case.forward, case.y, case.x)

    return swapped


def both_ways(pair: Pair) -> tuple[Pair, ...]:
    """Return the pair and, unless it is its own adjoint, the pair seen from the other side."""
    if pair.forward is pair.adjoint:
        return (pair,)
    back = Pair(
        pair.adjoint_name,
        pair.name,
        pair.adjoint,
        pair.forward,
        pair.range,
        pair.domain,
        _reversed(pair.example),
    )
    return pair, back


_PAIRS: tuple[Pair, ...] = (
    Pair("broadcast", "sum_reduce", Broadcast, SumReduce, "I", "I", _broadcast),
    Pair("all_sum_reduce", "all_sum_reduce", AllSumReduce, AllSumReduce, "I", "I", _all_sum_reduce),
    Pair("copy", "sum_to_replicated", Copy, SumToReplicated, "R", "I", _copy),
    Pair("scatter", "gather", Scatter, Gather, "I", "S", _scatter),
    Pair(
        "slice_replicated",
        "concat_replicated",
        SliceReplicated,
        ConcatReplicated,
        "R",
        "S",
        _slice_replicated,
    ),
    Pair("all_gather", "reduce_scatter", AllGather, ReduceScatter, "S", "I", _all_gather),
    Pair("all_to_all", "all_to_all", AllToAll, AllToAll, "S", "S", _all_to_all),
    Pair("permute", "permute", Permute, Permute, "S", "S", _permute),
    Pair("send", "recv", Send, Recv, "I", "I", _send),
    Pair("halo_exchange", "halo_add", HaloExchange, HaloAdd, "S", "I", _halo),
    Pair("repartition", "repartition", Repartition, Repartition, "S", "S", _repartition),
    Pair("all_gather_rows", "add_rows", AllGatherRows, AddRows, "S", "I", _rows),
)

TABLE: tuple[Pair, ...] = tuple(row for pair in _PAIRS for row in both_ways(pair))
"""Every operator with its adjoint; a pair of two different maps stands in it both ways round."""


def table_text(table: Sequence[Pair] = TABLE) -> str:
    """Return a table as Markdown, one row for each operator."""
    lines = ["| operator | from -> to | adjoint (its backward) |", "|---|---|---|"]
    lines += [f"| `{p.name}` | {p.domain} -> {p.range} | `{p.adjoint_name}` |" for p in table]
    return "\n".join(lines)

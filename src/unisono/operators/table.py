"""The adjoint tables: each operator, its adjoint, its spaces, and an example to test it with.

Docs print them; the dot-product, gradient and second-gradient tests run over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from unisono.comm import Communicator
from unisono.operators import partitioned as between
from unisono.operators.gather import (
    AllGather,
    ConcatReplicated,
    Gather,
    MoveCut,
    ReduceScatter,
    Scatter,
    SliceReplicated,
    all_gather,
    concat_replicated,
    gather,
    move_cut,
    reduce_scatter,
    scatter,
    slice_replicated,
)
from unisono.operators.halo import HaloAdd, HaloExchange, halo_add, halo_exchange
from unisono.operators.linear import LinearMap
from unisono.operators.move import AllToAll, Permute, Recv, Send, all_to_all, permute, recv, send
from unisono.operators.reduce import (
    AllSumReduce,
    Broadcast,
    Copy,
    SumReduce,
    SumToReplicated,
    all_sum_reduce,
    broadcast,
    copy,
    sum_reduce,
    sum_to_replicated,
)
from unisono.operators.repartition import Repartition, repartition
from unisono.operators.rows import AddRows, AllGatherRows, add_rows, all_gather_rows
from unisono.topology import Partition, RowPlan, decompose, halo, overlap

Map = Callable[[Tensor], Tensor]
MakeTensor = Callable[..., Tensor]
"""`make(*shape)` draws a tensor of this rank, `make(*shape, same=True)` one equal on all ranks."""


@dataclass(frozen=True)
class Example:
    """One case of an operator on this rank: the two maps and a point of each space.

    The points may have no elements on ranks that hold nothing.
    """

    forward: Map
    adjoint: Map
    x: Tensor
    y: Tensor

    @classmethod
    def of(
        cls,
        forward: Callable[..., Tensor],
        adjoint: Callable[..., Tensor],
        x: Tensor,
        y: Tensor,
        **options: Any,
    ) -> Example:
        """Return the case of two functions that take the same options."""
        return cls(partial(forward, **options), partial(adjoint, **options), x, y)


MakeExample = Callable[[Communicator, Sequence[int], MakeTensor], Example]
"""`example(comm, lengths, make)`: a case with `lengths[r]` rows on rank r."""


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
    example: MakeExample
    """Makes a case."""


def _broadcast(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    root, shape = comm.size - 1, (lengths[0], 2)
    return Example(
        partial(broadcast, src=root, like=(shape, make(0).dtype), comm=comm),
        partial(sum_reduce, dst=root, comm=comm),
        make(*(shape if comm.rank == root else (0,))),
        make(*shape),
    )


def _all_sum_reduce(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    shape = lengths[0], 2
    return Example.of(all_sum_reduce, all_sum_reduce, make(*shape), make(*shape), comm=comm)


def _copy(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    x, y = make(lengths[0], 2, same=True), make(lengths[0], 2)
    return Example.of(copy, sum_to_replicated, x, y, comm=comm)


def _scatter(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    root = comm.size - 1
    x = make(*((3, sum(lengths)) if comm.rank == root else (0,)))
    return Example(
        partial(scatter, src=root, dim=1, sizes=lengths, comm=comm),
        partial(gather, dst=root, dim=1, sizes=lengths, comm=comm),
        x,
        make(3, lengths[comm.rank]),
    )


def _slice_replicated(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    x, y = make(2, sum(lengths), same=True), make(2, lengths[comm.rank])
    return Example.of(slice_replicated, concat_replicated, x, y, dim=1, sizes=lengths, comm=comm)


def _all_gather(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    x, y = make(2, lengths[comm.rank]), make(2, sum(lengths))
    return Example.of(all_gather, reduce_scatter, x, y, dim=-1, sizes=lengths, comm=comm)


def _move_cut(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """Three columns for the ranks: some get none."""
    columns = decompose.split_sizes(3, comm.size)
    return Example(
        partial(move_cut, source=0, dest=-1, source_sizes=lengths, comm=comm),
        partial(move_cut, source=-1, dest=0, dest_sizes=lengths, comm=comm),
        make(lengths[comm.rank], 3),
        make(sum(lengths), columns[comm.rank]),
    )


def _all_to_all(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    size = comm.size
    counts = [[lengths[(r + 2 * q) % size] for q in range(size)] for r in range(size)]
    sent, received = counts[comm.rank], [counts[r][comm.rank] for r in range(size)]
    return Example(
        partial(all_to_all, send_sizes=sent, recv_sizes=received, comm=comm),
        partial(all_to_all, send_sizes=received, recv_sizes=sent, comm=comm),
        make(sum(sent), 2),
        make(sum(received), 2),
    )


def _permute(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    size = comm.size
    return Example(
        partial(permute, destination=lambda r: (r + 1) % size, comm=comm),
        partial(permute, destination=lambda r: (r - 1) % size, comm=comm),
        make(lengths[comm.rank], 2),
        make(lengths[comm.rank - 1], 2),
    )


def _send(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """Rank 0 sends to the last rank; ranks between them, and a rank alone, do nothing."""
    shape, nothing = (lengths[0], 2), make(0)
    first, last = 0, comm.size - 1

    def moved(t: Tensor, *, src: int, dst: int) -> Tensor:
        if src == dst:
            return t.view_as(t)
        if comm.rank == src:
            return send(t, dst, comm=comm)
        return recv((shape, t.dtype), src, token=t, comm=comm) if comm.rank == dst else t * 1

    x = make(*shape) if comm.rank == first else nothing
    y = make(*shape) if comm.rank == last else nothing
    return Example(partial(moved, src=first, dst=last), partial(moved, src=last, dst=first), x, y)


def _rows(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """Every rank needs the first and last row of every other one."""
    wanted = [[] if n == 0 else sorted({0, n - 1}) for n in lengths]
    me = comm.rank
    plan = RowPlan.from_lists(
        lengths[me],
        [wanted[me] if rank != me else [] for rank in range(comm.size)],
        [len(wanted[rank]) if rank != me else 0 for rank in range(comm.size)],
    )
    x, y = make(lengths[me], 2), make(plan.num_received, 2)
    return Example.of(all_gather_rows, add_rows, x, y, plan=plan, comm=comm)


def _halo(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """A kernel of 3 with two points of padding before and one after."""
    cuts = [decompose.bounds(lengths), (0, 2)]
    plan = halo.plan(cuts, (comm.rank, 0), (3, 1), padding=((2, 1), (0, 0)))
    x, y = make(*plan.block_shape), make(*plan.window_shape)
    return Example.of(halo_exchange, halo_add, x, y, plan=plan, comm=comm)


def _repartition(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    """Rows to columns, the ranks in descending order."""
    rows = [decompose.bounds(lengths), (0, 3)]
    columns = [(0, sum(lengths)), decompose.split_cuts(3, comm.size)]
    ranks = range(comm.size)
    plan = overlap.overlaps(rows, ranks, columns, ranks[::-1], comm.rank)
    return Example(
        partial(repartition, plan=plan, comm=comm),
        partial(repartition, plan=plan.adjoint, comm=comm),
        make(*(plan.source_shape or ())),
        make(*(plan.dest_shape or ())),
    )


def _broadcast_between(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    everybody, shape = Partition([comm.size], comm=comm), (lengths[0], 2)
    last = Partition([1], ranks=[comm.size - 1], comm=comm)
    return Example(
        partial(between.broadcast, src=last, dest=everybody),
        partial(between.sum_reduce, src=everybody, dest=last),
        make(*(shape if last.active else (0,))),
        make(*shape),
    )


def _sum_along(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, run = Partition([comm.size], comm=comm), between.all_sum_reduce
    return Example.of(run, run, make(lengths[0], 2), make(lengths[0], 2), partition=P, axes=0)


def _gather_along(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, total = Partition([1, comm.size], comm=comm), sum(lengths)
    x = make(3, decompose.split_sizes(total, comm.size)[comm.rank])  # sums are cut so
    maps = between.all_gather, between.reduce_scatter
    return Example.of(*maps, x, make(3, total), partition=P, axis=1)


def _replicate(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, maps = Partition([comm.size], comm=comm), (between.replicate, between.sum_to_replicated)
    x, y = make(lengths[0], 2, same=True), make(lengths[0], 2)
    return Example.of(*maps, x, y, partition=P, axes=0)


def _gather_to_replicated(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, total = Partition([comm.size], comm=comm), sum(lengths)
    x = make(3, decompose.split_sizes(total, comm.size)[comm.rank])
    maps = between.gather_to_replicated, between.split
    return Example.of(*maps, x, make(3, total, same=True), partition=P, axis=0, dim=1)


def _both_ways(*pairs: Pair) -> tuple[Pair, ...]:
    """Return the pairs, each also seen from its other side unless it is its own adjoint."""
    rows: list[Pair] = []
    for p in pairs:
        rows.append(p)
        if p.forward is not p.adjoint:
            back = (p.adjoint_name, p.name, p.adjoint, p.forward, p.range, p.domain)
            rows.append(Pair(*back, partial(_reversed, p.example)))
    return tuple(rows)


def _reversed(
    example: MakeExample, comm: Communicator, lengths: Sequence[int], make: MakeTensor
) -> Example:
    case = example(comm, lengths, make)
    return Example(case.adjoint, case.forward, case.y, case.x)


# fmt: off
TABLE: tuple[Pair, ...] = _both_ways(
    Pair("broadcast", "sum_reduce", Broadcast, SumReduce, "I", "I", _broadcast),
    Pair("all_sum_reduce", "all_sum_reduce", AllSumReduce, AllSumReduce, "I", "I", _all_sum_reduce),
    Pair("copy", "sum_to_replicated", Copy, SumToReplicated, "R", "I", _copy),
    Pair("scatter", "gather", Scatter, Gather, "I", "S", _scatter),
    Pair("slice_replicated", "concat_replicated", SliceReplicated, ConcatReplicated, "R", "S",
         _slice_replicated),
    Pair("all_gather", "reduce_scatter", AllGather, ReduceScatter, "S", "I", _all_gather),
    Pair("move_cut", "move_cut", MoveCut, MoveCut, "S", "S", _move_cut),
    Pair("all_to_all", "all_to_all", AllToAll, AllToAll, "S", "S", _all_to_all),
    Pair("permute", "permute", Permute, Permute, "S", "S", _permute),
    Pair("send", "recv", Send, Recv, "I", "I", _send),
    Pair("halo_exchange", "halo_add", HaloExchange, HaloAdd, "S", "I", _halo),
    Pair("repartition", "repartition", Repartition, Repartition, "S", "S", _repartition),
    Pair("all_gather_rows", "add_rows", AllGatherRows, AddRows, "S", "I", _rows),
)
"""Every operator with its adjoint; a pair of two different maps stands in it both ways round."""

PARTITION_TABLE: tuple[Pair, ...] = _both_ways(
    Pair("broadcast", "sum_reduce", Broadcast, SumReduce, "I", "I", _broadcast_between),
    Pair("all_sum_reduce", "all_sum_reduce", AllSumReduce, AllSumReduce, "I", "I", _sum_along),
    Pair("all_gather", "reduce_scatter", AllGather, ReduceScatter, "S", "I", _gather_along),
    Pair("replicate", "sum_to_replicated", Copy, SumToReplicated, "R", "I", _replicate),
    Pair("gather_to_replicated", "split", ConcatReplicated, SliceReplicated, "S", "R",
         _gather_to_replicated),
)
"""Every operator between partitions with its adjoint, both ways round."""
# fmt: on


def table_text(table: Sequence[Pair] = TABLE) -> str:
    """Return a table as Markdown, one row for each operator."""
    lines = ["| operator | from -> to | adjoint (its backward) |", "|---|---|---|"]
    lines += [f"| `{p.name}` | {p.domain} -> {p.range} | `{p.adjoint_name}` |" for p in table]
    return "\n".join(lines)

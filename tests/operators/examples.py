"""Cases of the adjoint tables: for each pair the two maps, and a point of each space."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from unisono.nn import functional as between
from unisono.operators import (
    add_rows,
    all_gather,
    all_gather_rows,
    all_sum_reduce,
    all_to_all,
    broadcast,
    concat_replicated,
    copy,
    gather,
    halo_add,
    halo_exchange,
    move_cut,
    permute,
    recv,
    reduce_scatter,
    repartition,
    scatter,
    send,
    slice_replicated,
    sum_reduce,
    sum_to_replicated,
)
from unisono.topology import Partition, RowPlan, decompose, halo, overlap


@dataclass(frozen=True)
class Example:
    """One case of an operator on this rank; its points may have no elements."""

    forward: object
    adjoint: object
    x: object
    y: object

    @classmethod
    def of(cls, forward, adjoint, x, y, **options):
        """Return the case of two functions that take the same options."""
        return cls(partial(forward, **options), partial(adjoint, **options), x, y)


def example(pair, comm, lengths, make, cases=None):
    """Return a case of a pair, with `lengths[r]` rows on rank r.

    `make(*shape)` draws a tensor of this rank, `make(*shape, same=True)` one equal on all ranks.
    `cases` are those of `TABLE`, or `PARTITION_CASES`.
    """
    cases = cases or CASES
    if pair.name in cases:
        return cases[pair.name](comm, lengths, make)
    case = cases[pair.adjoint_name](comm, lengths, make)
    return Example(case.adjoint, case.forward, case.y, case.x)


def _broadcast(comm, lengths, make):
    root, shape = comm.size - 1, (lengths[0], 2)
    return Example(
        partial(broadcast, src=root, like=(shape, make(0).dtype), comm=comm),
        partial(sum_reduce, dst=root, comm=comm),
        make(*(shape if comm.rank == root else (0,))),
        make(*shape),
    )


def _all_sum_reduce(comm, lengths, make):
    shape = lengths[0], 2
    return Example.of(all_sum_reduce, all_sum_reduce, make(*shape), make(*shape), comm=comm)


def _copy(comm, lengths, make):
    x, y = make(lengths[0], 2, same=True), make(lengths[0], 2)
    return Example.of(copy, sum_to_replicated, x, y, comm=comm)


def _scatter(comm, lengths, make):
    root = comm.size - 1
    x = make(*((3, sum(lengths)) if comm.rank == root else (0,)))
    return Example(
        partial(scatter, src=root, dim=1, sizes=lengths, comm=comm),
        partial(gather, dst=root, dim=1, sizes=lengths, comm=comm),
        x,
        make(3, lengths[comm.rank]),
    )


def _slice_replicated(comm, lengths, make):
    x, y = make(2, sum(lengths), same=True), make(2, lengths[comm.rank])
    return Example.of(slice_replicated, concat_replicated, x, y, dim=1, sizes=lengths, comm=comm)


def _all_gather(comm, lengths, make):
    x, y = make(2, lengths[comm.rank]), make(2, sum(lengths))
    return Example.of(all_gather, reduce_scatter, x, y, dim=-1, sizes=lengths, comm=comm)


def _move_cut(comm, lengths, make):
    """Three columns for the ranks: some get none."""
    columns = decompose.split_sizes(3, comm.size)
    return Example(
        partial(move_cut, source=0, dest=-1, source_sizes=lengths, comm=comm),
        partial(move_cut, source=-1, dest=0, dest_sizes=lengths, comm=comm),
        make(lengths[comm.rank], 3),
        make(sum(lengths), columns[comm.rank]),
    )


def _all_to_all(comm, lengths, make):
    size = comm.size
    counts = [[lengths[(r + 2 * q) % size] for q in range(size)] for r in range(size)]
    sent, received = counts[comm.rank], [counts[r][comm.rank] for r in range(size)]
    return Example(
        partial(all_to_all, send_sizes=sent, recv_sizes=received, comm=comm),
        partial(all_to_all, send_sizes=received, recv_sizes=sent, comm=comm),
        make(sum(sent), 2),
        make(sum(received), 2),
    )


def _permute(comm, lengths, make):
    size = comm.size
    return Example(
        partial(permute, destination=lambda r: (r + 1) % size, comm=comm),
        partial(permute, destination=lambda r: (r - 1) % size, comm=comm),
        make(lengths[comm.rank], 2),
        make(lengths[comm.rank - 1], 2),
    )


def _send(comm, lengths, make):
    """Rank 0 sends to the last rank; ranks between them, and a rank alone, do nothing."""
    shape, nothing = (lengths[0], 2), make(0)
    first, last = 0, comm.size - 1

    def moved(t, *, src, dst):
        if src == dst:
            return t.view_as(t)
        if comm.rank == src:
            return send(t, dst, comm=comm)
        return recv((shape, t.dtype), src, token=t, comm=comm) if comm.rank == dst else t * 1

    x = make(*shape) if comm.rank == first else nothing
    y = make(*shape) if comm.rank == last else nothing
    return Example(partial(moved, src=first, dst=last), partial(moved, src=last, dst=first), x, y)


def _rows(comm, lengths, make):
    """Every rank needs the first and last row of every other one."""
    wanted = [[] if n == 0 else sorted({0, n - 1}) for n in lengths]
    me = comm.rank
    plan = RowPlan.from_lists(
        lengths[me],
        [wanted[me] if rank != me else [] for rank in range(comm.size)],
        [len(wanted[rank]) if rank != me else 0 for rank in range(comm.size)],
    )
    x, y = make(lengths[me], 2), make(sum(plan.recv_sizes), 2)
    return Example.of(all_gather_rows, add_rows, x, y, plan=plan, comm=comm)


def _halo(comm, lengths, make):
    """A kernel of 3 with two points of padding before and one after."""
    cuts = [decompose.bounds(lengths), (0, 2)]
    plan = halo.plan(cuts, (comm.rank, 0), (3, 1), padding=((2, 1), (0, 0)))
    x, y = make(*plan.block_shape), make(*plan.window_shape)
    return Example.of(halo_exchange, halo_add, x, y, plan=plan, comm=comm)


def _repartition(comm, lengths, make):
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


def _broadcast_between(comm, lengths, make):
    everybody, shape = Partition([comm.size], comm=comm), (lengths[0], 2)
    last = Partition([1], ranks=[comm.size - 1], comm=comm)
    return Example(
        partial(between.broadcast, src=last, dest=everybody),
        partial(between.sum_reduce, src=everybody, dest=last),
        make(*(shape if last.active else (0,))),
        make(*shape),
    )


def _sum_along(comm, lengths, make):
    P, run = Partition([comm.size], comm=comm), between.all_sum_reduce
    return Example.of(run, run, make(lengths[0], 2), make(lengths[0], 2), partition=P, axes=0)


def _gather_along(comm, lengths, make):
    P, total = Partition([1, comm.size], comm=comm), sum(lengths)
    x = make(3, decompose.split_sizes(total, comm.size)[comm.rank])  # sums are cut so
    maps = between.all_gather, between.reduce_scatter
    return Example.of(*maps, x, make(3, total), partition=P, axis=1)


def _replicate(comm, lengths, make):
    P, maps = Partition([comm.size], comm=comm), (between.replicate, between.sum_to_replicated)
    x, y = make(lengths[0], 2, same=True), make(lengths[0], 2)
    return Example.of(*maps, x, y, partition=P, axes=0)


def _gather_to_replicated(comm, lengths, make):
    P, total = Partition([comm.size], comm=comm), sum(lengths)
    x = make(3, decompose.split_sizes(total, comm.size)[comm.rank])
    maps = between.gather_to_replicated, between.split
    return Example.of(*maps, x, make(3, total, same=True), partition=P, axis=0, dim=1)


CASES = {
    "broadcast": _broadcast,
    "all_sum_reduce": _all_sum_reduce,
    "copy": _copy,
    "scatter": _scatter,
    "slice_replicated": _slice_replicated,
    "all_gather": _all_gather,
    "move_cut": _move_cut,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "send": _send,
    "halo_exchange": _halo,
    "repartition": _repartition,
    "all_gather_rows": _rows,
}
PARTITION_CASES = {
    "broadcast": _broadcast_between,
    "all_sum_reduce": _sum_along,
    "all_gather": _gather_along,
    "replicate": _replicate,
    "gather_to_replicated": _gather_to_replicated,
}

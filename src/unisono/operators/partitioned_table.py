"""The adjoint table of the operators between partitions, with an example each."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.comm import Communicator
from unisono.operators import partitioned as op
from unisono.operators.all_gather import AllGather, ReduceScatter
from unisono.operators.all_reduce import AllSumReduce
from unisono.operators.replicate import Copy, SumToReplicated
from unisono.operators.slice import ConcatReplicated, SliceReplicated
from unisono.operators.table import Example, MakeTensor, Pair, both_ways
from unisono.topology import Partition
from unisono.topology.decompose import split_sizes


def _broadcast(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    everybody, shape = Partition([comm.size], comm=comm), (lengths[0], 2)
    last = Partition([1], ranks=[comm.size - 1], comm=comm)
    return Example(
        lambda t: op.broadcast(t, last, everybody),
        lambda t: op.sum_reduce(t, everybody, last),
        make(*(shape if last.active else (0,))),
        make(*shape),
    )


def _all_sum_reduce(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, shape = Partition([comm.size], comm=comm), (lengths[0], 2)
    run = lambda t: op.all_sum_reduce(t, P, 0)  # noqa: E731
    return Example(run, run, make(*shape), make(*shape))


def _all_gather(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, total = Partition([1, comm.size], comm=comm), sum(lengths)
    return Example(
        lambda t: op.all_gather(t, P, 1),
        lambda t: op.reduce_scatter(t, P, 1),
        make(3, split_sizes(total, comm.size)[comm.rank]),  # a sum is cut into balanced blocks
        make(3, total),
    )


def _replicate(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, shape = Partition([comm.size], comm=comm), (lengths[0], 2)
    return Example(
        lambda t: op.replicate(t, P, 0),
        lambda t: op.sum_to_replicated(t, P, 0),
        make(*shape, same=True),
        make(*shape),
    )


def _gather_to_replicated(comm: Communicator, lengths: Sequence[int], make: MakeTensor) -> Example:
    P, total = Partition([comm.size], comm=comm), sum(lengths)
    return Example(
        lambda t: op.gather_to_replicated(t, P, 0, dim=1),
        lambda t: op.split(t, P, 0, dim=1),
        make(3, split_sizes(total, comm.size)[comm.rank]),
        make(3, total, same=True),
    )


_PAIRS: tuple[Pair, ...] = (
    Pair("broadcast", "sum_reduce", op.Spread, op.Collect, "I", "I", _broadcast),
    Pair("all_sum_reduce", "all_sum_reduce", AllSumReduce, AllSumReduce, "I", "I", _all_sum_reduce),
    Pair("all_gather", "reduce_scatter", AllGather, ReduceScatter, "S", "I", _all_gather),
    Pair("replicate", "sum_to_replicated", Copy, SumToReplicated, "R", "I", _replicate),
    Pair(
        "gather_to_replicated", "split", ConcatReplicated, SliceReplicated, "S", "R",
        _gather_to_replicated,
    ),
)  # fmt: skip

PARTITION_TABLE: tuple[Pair, ...] = tuple(row for pair in _PAIRS for row in both_ways(pair))
"""Every operator between partitions with its adjoint, both ways round."""

"""Every movement of data as a linear operator beside its adjoint, differentiable to any order.

Functions on a `Communicator`; the classes beside them are their autograd Functions. `TABLE` lists
the pairs. Spaces: R replicated (counts once), S sharded, I each rank's own.
"""

from __future__ import annotations

from unisono.operators.gather import (
    AllGatherMap,
    ConcatReplicated,
    Gather,
    ReduceScatterMap,
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
from unisono.operators.halo import HaloAddMap, HaloExchangeMap, halo_add, halo_exchange
from unisono.operators.linear import LinearMap, attach, set_adjoint
from unisono.operators.move import AllToAll, Permute, Recv, Send, all_to_all, permute, recv, send
from unisono.operators.reduce import (
    AllSumReduceMap,
    BroadcastMap,
    Copy,
    SumReduceMap,
    SumToReplicated,
    all_sum_reduce,
    broadcast,
    copy,
    sum_reduce,
    sum_to_replicated,
)
from unisono.operators.repartition import RepartitionMap, repartition
from unisono.operators.rows import add_rows, all_gather_rows
from unisono.operators.table import TABLE, Pair, table_text
from unisono.removed import removed_name

__all__ = [
    "TABLE",
    "AllGatherMap",
    "AllSumReduceMap",
    "AllToAll",
    "BroadcastMap",
    "ConcatReplicated",
    "Copy",
    "Gather",
    "HaloAddMap",
    "HaloExchangeMap",
    "LinearMap",
    "Pair",
    "Permute",
    "Recv",
    "ReduceScatterMap",
    "RepartitionMap",
    "Scatter",
    "Send",
    "SliceReplicated",
    "SumReduceMap",
    "SumToReplicated",
    "add_rows",
    "all_gather",
    "all_gather_rows",
    "all_sum_reduce",
    "all_to_all",
    "attach",
    "broadcast",
    "concat_replicated",
    "copy",
    "gather",
    "halo_add",
    "halo_exchange",
    "move_cut",
    "permute",
    "recv",
    "reduce_scatter",
    "repartition",
    "scatter",
    "send",
    "set_adjoint",
    "slice_replicated",
    "sum_reduce",
    "sum_to_replicated",
    "table_text",
]


def __getattr__(name: str) -> object:
    raise removed_name(f"unisono.operators.{name}")

"""The adjoint tables: each operator, its adjoint and its spaces.

Docs print them; the dot-product, gradient and second-gradient tests run over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.operators.gather import (
    AllGatherMap,
    ConcatReplicated,
    Gather,
    ReduceScatterMap,
    Scatter,
    SliceReplicated,
)
from unisono.operators.halo import HaloAddMap, HaloExchangeMap
from unisono.operators.linear import LinearMap
from unisono.operators.move import AllToAll, Permute, Recv, Send
from unisono.operators.reduce import (
    AllSumReduceMap,
    BroadcastMap,
    Copy,
    SumReduceMap,
    SumToReplicated,
)
from unisono.operators.repartition import RepartitionMap


@dataclass(frozen=True)
class Pair:
    """A linear operator and its adjoint."""

    name: str
    """Name of the function."""
    adjoint_name: str
    """Name of the adjoint's function."""
    forward: type[LinearMap]
    """Its autograd Function, or that which moves its data."""
    adjoint: type[LinearMap]
    """The adjoint's autograd Function."""
    domain: str
    """Space of the input: R replicated, S sharded, I each rank's own."""
    range: str
    """Space of the output."""


def _both_ways(*pairs: Pair) -> tuple[Pair, ...]:
    """Return the pairs, each also seen from its other side unless it is its own adjoint."""
    rows: list[Pair] = []
    for p in pairs:
        rows.append(p)
        if p.name != p.adjoint_name:
            back = (p.adjoint_name, p.name, p.adjoint, p.forward, p.range, p.domain)
            rows.append(Pair(*back))
    return tuple(rows)


# fmt: off
TABLE: tuple[Pair, ...] = _both_ways(
    Pair("broadcast", "sum_reduce", BroadcastMap, SumReduceMap, "I", "I"),
    Pair("all_sum_reduce", "all_sum_reduce", AllSumReduceMap, AllSumReduceMap, "I", "I"),
    Pair("copy", "sum_to_replicated", Copy, SumToReplicated, "R", "I"),
    Pair("scatter", "gather", Scatter, Gather, "I", "S"),
    Pair("slice_replicated", "concat_replicated", SliceReplicated, ConcatReplicated, "R", "S"),
    Pair("all_gather", "reduce_scatter", AllGatherMap, ReduceScatterMap, "S", "I"),
    Pair("move_cut", "move_cut", AllToAll, AllToAll, "S", "S"),
    Pair("all_to_all", "all_to_all", AllToAll, AllToAll, "S", "S"),
    Pair("permute", "permute", Permute, Permute, "S", "S"),
    Pair("send", "recv", Send, Recv, "I", "I"),
    Pair("halo_exchange", "halo_add", HaloExchangeMap, HaloAddMap, "S", "I"),
    Pair("repartition", "repartition", RepartitionMap, RepartitionMap, "S", "S"),
    Pair("all_gather_rows", "add_rows", AllToAll, AllToAll, "S", "I"),
)
"""Every operator with its adjoint; a pair of two different maps stands in it both ways round."""

PARTITION_TABLE: tuple[Pair, ...] = _both_ways(
    Pair("broadcast", "sum_reduce", BroadcastMap, SumReduceMap, "I", "I"),
    Pair("all_sum_reduce", "all_sum_reduce", AllSumReduceMap, AllSumReduceMap, "I", "I"),
    Pair("all_gather", "reduce_scatter", AllGatherMap, ReduceScatterMap, "S", "I"),
    Pair("replicate", "sum_to_replicated", Copy, SumToReplicated, "R", "I"),
    Pair("gather_to_replicated", "split", ConcatReplicated, SliceReplicated, "S", "R"),
)
"""Every operator between partitions with its adjoint, both ways round."""
# fmt: on


def table_text(table: Sequence[Pair] = TABLE) -> str:
    """Return a table as Markdown, one row for each operator."""
    lines = ["| operator | from -> to | adjoint (its backward) |", "|---|---|---|"]
    lines += [f"| `{p.name}` | {p.domain} -> {p.range} | `{p.adjoint_name}` |" for p in table]
    return "\n".join(lines)

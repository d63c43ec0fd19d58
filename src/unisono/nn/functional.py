"""The operators between partitions as functions, without a layer: who talks to whom follows from
the grids of ranks. `TABLE` lists them with their adjoints.

Plain linear maps on the direct sum of the ranks' blocks: `broadcast`, `sum_reduce`,
`all_sum_reduce`, `all_gather`, `reduce_scatter`. For values that every rank holds equal and whose
backward every rank seeds alike: `replicate`, `sum_to_replicated`, `gather_to_replicated`, `split`.
"""

from __future__ import annotations

from unisono.operators.partitioned import (
    all_gather,
    all_sum_reduce,
    broadcast,
    gather_to_replicated,
    reduce_scatter,
    replicate,
    split,
    sum_reduce,
    sum_to_replicated,
)
from unisono.operators.table import PARTITION_TABLE as TABLE

__all__ = [
    "TABLE",
    "all_gather",
    "all_sum_reduce",
    "broadcast",
    "gather_to_replicated",
    "reduce_scatter",
    "replicate",
    "split",
    "sum_reduce",
    "sum_to_replicated",
]

"""Shapes over ranks: meshes, partitions, and the plans of what must move between blocks.

`decompose`, `window`, `halo`, `overlap` and their neighbours are pure integer arithmetic and import
no torch; `Mesh`, `Partition` and `RowPlan` are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from unisono.removed import removed_name
from unisono.topology import decompose, halo, overlap, resample, window
from unisono.topology.draw import draw
from unisono.topology.fanout import Group, RankGrid, broadcast_groups, reduce_groups
from unisono.topology.halo import HaloPiece, HaloPlan, Message
from unisono.topology.overlap import LocalMove, Move, OverlapPlan
from unisono.topology.window import Segment

if TYPE_CHECKING:
    from unisono.topology.mesh import Mesh
    from unisono.topology.partition import Partition
    from unisono.topology.rows import RowPlan

__all__ = [
    "Group",
    "HaloPlan",
    "RankGrid",
    "LocalMove",
    "Mesh",
    "Message",
    "Move",
    "OverlapPlan",
    "Partition",
    "HaloPiece",
    "RowPlan",
    "Segment",
    "broadcast_groups",
    "decompose",
    "draw",
    "halo",
    "overlap",
    "pooling",
    "reduce_groups",
    "resample",
    "transposed",
    "window",
]

pooling = transposed = window
"""Other names of `window`, which has the arithmetic of pooling and of transposed convolutions."""

_HOMES = {
    "Mesh": "unisono.topology.mesh",
    "Partition": "unisono.topology.partition",
    "RowPlan": "unisono.topology.rows",
}


def __getattr__(name: str) -> object:
    """Load a class that needs torch, once."""
    home = _HOMES.get(name)
    if home is None:
        raise removed_name(f"unisono.topology.{name}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value

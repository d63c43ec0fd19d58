"""Distributed layers: tensors cut into blocks over a grid of ranks, layers that fit torch's."""

from __future__ import annotations

from unisono.nn.module import Module
from unisono.nn.movement import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedTranspose,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from unisono.nn.structure import structure_check

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "DistributedTranspose",
    "Module",
    "ReduceScatter",
    "Repartition",
    "SumReduce",
    "structure_check",
]

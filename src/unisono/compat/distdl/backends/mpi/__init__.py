"""DistDL's `backends.mpi`: partitions, buffers, autograd functions, structures of tensors."""

from __future__ import annotations

from typing import Any

from . import (
    compare,
    functional,
    halo_exchange,
    partition,
    repartition,
    tensor_comm,
    tensor_decomposition,
)
from .buffer import MPIBufferManager as BufferManager
from .buffer import MPIExpandableBuffer as ExpandableBuffer
from .nulls import operations
from .partition import MPICartesianPartition as CartesianPartition
from .partition import MPIPartition as Partition
from .tensor_comm import assemble_global_tensor_structure, broadcast_tensor_structure

__all__ = [
    "BufferManager",
    "CartesianPartition",
    "ExpandableBuffer",
    "Partition",
    "assemble_global_tensor_structure",
    "broadcast_tensor_structure",
    "compare",
    "functional",
    "halo_exchange",
    "operation_map",
    "partition",
    "repartition",
    "tensor_comm",
    "tensor_decomposition",
]


operation_map: dict[str, Any]
"""Reductions by name, looked up when they are used."""


def __getattr__(name: str) -> Any:
    """Return `operation_map`: mpi4py's operations where it is in use by then, else ours."""
    if name == "operation_map":
        return operations()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

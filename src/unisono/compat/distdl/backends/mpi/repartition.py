"""DistDL's `backends.mpi.repartition`: buffers for the boxes that change hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...utilities.dtype import torch_to_numpy_dtype_dict
from .buffer import MPIBufferManager, MPIExpandableBuffer

Overlap = tuple[Any, Any, Any]
"""Slices, shape and partner of a box; three times None where there is none."""


def allocate_repartition_buffers(
    buffer_manager: MPIBufferManager,
    P_x_to_y_overlaps: Sequence[Overlap],
    P_y_to_x_overlaps: Sequence[Overlap],
    dtype: torch.dtype,
) -> tuple[list[MPIExpandableBuffer | None], list[MPIExpandableBuffer | None]]:
    """Return one buffer for each box that goes out, and one for each that comes in.

    None where there is no box, or it stays on this rank.
    """
    both = (P_x_to_y_overlaps, P_y_to_x_overlaps)
    count = sum(_travels(overlap) for overlaps in both for overlap in overlaps)
    free = iter(buffer_manager.request_buffers(count, torch_to_numpy_dtype_dict[dtype]))
    out, into = (
        [_room(next(free), overlap) if _travels(overlap) else None for overlap in overlaps]
        for overlaps in both
    )
    return out, into


def _travels(overlap: Overlap) -> bool:
    slices, _, partner = overlap
    return slices is not None and not isinstance(partner, str)


def _room(buffer: MPIExpandableBuffer, overlap: Overlap) -> MPIExpandableBuffer:
    buffer.allocate_view(overlap[1])
    return buffer

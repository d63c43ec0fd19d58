"""DistDL's `backends.mpi.halo_exchange`: buffers for bulk and ghosts of each dim."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...utilities.dtype import torch_to_numpy_dtype_dict
from ...utilities.slicing import compute_nd_slice_shape
from .buffer import MPIBufferManager, MPIExpandableBuffer


def allocate_halo_exchange_buffers(
    buffer_manager: MPIBufferManager,
    slices: Sequence[Sequence[tuple[slice, ...]]],
    recv_buffer_shape: np.ndarray,
    send_buffer_shape: np.ndarray,
    dtype: torch.dtype,
) -> list[list[MPIExpandableBuffer | None]]:
    """Return for each dim the buffers of left bulk, left ghosts, right bulk and right ghosts.

    Four buffers serve all dims, one after the other. None where nothing travels.
    """
    four = buffer_manager.request_buffers(4, torch_to_numpy_dtype_dict[dtype])
    made: list[list[MPIExpandableBuffer | None]] = []
    for dim, boxes in enumerate(slices):
        (send_left, send_right), (recv_left, recv_right) = (
            send_buffer_shape[dim],
            recv_buffer_shape[dim],
        )
        widths = (send_left, recv_left, send_right, recv_right)
        row: list[MPIExpandableBuffer | None] = []
        for buffer, box, width in zip(four, boxes, widths, strict=True):
            shape = compute_nd_slice_shape(box)
            is_used = width > 0 and bool(np.all(shape))
            if is_used:
                buffer.allocate_view(shape)
            row.append(buffer if is_used else None)
        made.append(row)
    return made

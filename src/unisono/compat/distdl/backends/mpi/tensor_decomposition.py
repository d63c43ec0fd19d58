"""DistDL's `backends.mpi.tensor_decomposition`: the blocks of all workers, as they are."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from unisono.errors import PartitionError

from ...utilities.torch import TensorStructure
from .partition import MPIPartition


def compute_subtensor_shapes_unbalanced(
    local: Tensor | TensorStructure, P_in: MPIPartition, P_out: MPIPartition | None = None
) -> np.ndarray | None:
    """Return the sizes of every block, an array of shape `P_in.shape + [dim]`.

    Collective over both partitions; None on ranks of neither.

    Args:
        local: own block, or its structure.
        P_in: partition of the blocks.
        P_out: who else is to know; it holds the first rank of `P_in`.
    """
    shapes = None
    if P_in.active:
        every = P_in._members.all_gather_object(tuple(int(n) for n in local.shape))
        wrong = next((shape for shape in every if len(shape) != P_in.dim), None)
        if wrong is not None:
            raise PartitionError.because(
                f"a block of shape {list(wrong)} on {P_in!r}",
                f"blocks {every}",
                f"{len(wrong)} tensor dims, {P_in.dim} partition dims",
                "one partition size for each tensor dim; write 1 where a dim is not split",
            )
        shapes = np.array(every, dtype=np.int64).reshape(*P_in.shape, P_in.dim)
    if P_out is not None and P_out.active:
        shapes = P_out.broadcast_data(shapes, P_data=P_in)
    return shapes

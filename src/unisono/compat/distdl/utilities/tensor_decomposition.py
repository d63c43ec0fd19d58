"""DistDL's `utilities.tensor_decomposition`: the blocks of all workers as arrays over their grid.

An array of shapes has the partition's shape and one more dim, for the sizes of a block.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .slicing import Ints, assemble_slices, compute_intersection, compute_subshape, range_index


class HasShape(Protocol):
    """A tensor, or a `TensorStructure`."""

    @property
    def shape(self) -> object:
        """Sizes of the whole tensor."""
        ...


def compute_subtensor_shapes_balanced(global_structure: HasShape, P_shape: Ints) -> np.ndarray:
    """Return the sizes of every balanced block of a tensor.

    Args:
        global_structure: of the whole tensor.
        P_shape: number of workers in each dim.
    """
    parts = np.atleast_1d(P_shape)
    whole = np.atleast_1d(np.asarray(global_structure.shape, dtype=np.int64))
    shapes = np.empty((*parts, len(parts)), dtype=np.int64)
    for index in range_index(parts):
        shapes[index] = compute_subshape(parts, index, whole)
    return shapes


def compute_subtensor_stop_indices(shapes: np.ndarray) -> np.ndarray:
    """Return where each block ends in the whole tensor: sums of sizes along each dim."""
    dims = range(shapes.ndim - 1)
    return np.stack([np.cumsum(shapes[..., dim], axis=dim) for dim in dims], axis=-1)


def compute_subtensor_start_indices(shapes: np.ndarray) -> np.ndarray:
    """Return where each block begins in the whole tensor."""
    return compute_subtensor_stop_indices(shapes) - shapes


def compute_subtensor_intersection_slice(
    x_start: Ints, x_stop: Ints, y_start: Ints, y_stop: Ints
) -> tuple[slice, ...] | None:
    """Return what two boxes share, relative to the first; None where they share nothing."""
    begin = np.atleast_1d(x_start)
    start, _, shape = compute_intersection(
        begin, np.atleast_1d(x_stop), np.atleast_1d(y_start), np.atleast_1d(y_stop)
    )
    if not np.all(shape):
        return None
    return assemble_slices(start - begin, start - begin + shape)

"""DistDL's arithmetic of blocks: `utilities.slicing`, `.tensor_decomposition`, `.index_tricks`.

All pure. Shapes and indices are sequences of ints; results are numpy arrays of int64. An array of
shapes has the partition's shape and one more dim, for the sizes of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from unisono.topology.decompose import flat_index

Ints = int | Sequence[int] | np.ndarray
"""One int, or one for each dim."""


def compute_subshape(P_shape: Ints, index: Ints, shape: Ints) -> np.ndarray:
    """Return the sizes of the balanced block at `index` of a tensor of `shape`.

    >>> compute_subshape([2, 3], [0, 2], [5, 7])
    array([3, 2])
    """
    parts, at, sizes = _arrays(P_shape, index, shape)
    return sizes // parts + (at < sizes % parts)


def compute_start_index(P_shape: Ints, index: Ints, shape: Ints) -> np.ndarray:
    """Return where the balanced block at `index` begins.

    >>> compute_start_index([2, 3], [1, 2], [5, 7])
    array([3, 5])
    """
    parts, at, sizes = _arrays(P_shape, index, shape)
    return sizes // parts * at + np.minimum(at, sizes % parts)


def compute_stop_index(P_shape: Ints, index: Ints, shape: Ints) -> np.ndarray:
    """Return where the balanced block at `index` ends."""
    return compute_start_index(P_shape, index, shape) + compute_subshape(P_shape, index, shape)


def compute_intersection(
    r0_start: Ints, r0_stop: Ints, r1_start: Ints, r1_stop: Ints
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return start, stop and shape of what two boxes share; the shape is 0 where they do not meet.

    >>> compute_intersection([0, 0], [4, 4], [2, 3], [6, 9])
    (array([2, 3]), array([4, 4]), array([2, 1]))
    """
    start = np.maximum(r0_start, r1_start)
    stop = np.minimum(r0_stop, r1_stop)
    return start, stop, np.maximum(stop - start, 0)


def assemble_slices(start: Iterable[int], stop: Iterable[int]) -> tuple[slice, ...]:
    """Return one slice for each dim.

    >>> assemble_slices([0, 2], [3, 4])
    (slice(0, 3, None), slice(2, 4, None))
    """
    return tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))


def compute_partition_intersection(
    P_r_shape: Ints, P_r_index: Ints, P_s_shape: Ints, P_s_index: Ints, x_shape: Ints
) -> tuple[slice, ...] | None:
    """Return what the balanced block at `P_r_index` shares with that at `P_s_index`.

    Relative to the first block; None where they share nothing.
    """
    ends = (compute_start_index, compute_stop_index)
    first_ends, other = (
        [end(shape, index, x_shape) for end in ends]
        for shape, index in ((P_r_shape, P_r_index), (P_s_shape, P_s_index))
    )
    return compute_subtensor_intersection_slice(*first_ends, *other)


def compute_nd_slice_volume(slices: Sequence[slice]) -> int:
    """Return the number of points under the slices."""
    return int(np.prod(compute_nd_slice_shape(slices)))


def compute_nd_slice_shape(slices: Sequence[slice]) -> np.ndarray:
    """Return the sizes of the box under the slices."""
    return np.array([s.stop - s.start for s in slices], dtype=np.int64)


def range_index(shape: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield every index of a grid, row-major.

    >>> list(range_index([2, 2]))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return product(*(range(n) for n in shape))


def worker_layout(shape: Ints) -> np.ndarray:
    """Return the rank at each index of a grid.

    >>> worker_layout([2, 3]).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    return np.arange(np.prod(shape)).reshape(shape)


def filtered_range_index(
    shape: Iterable[int],
    filter: Sequence[int | None],
) -> Iterator[tuple[int, ...]]:
    """Yield the indices of a grid that equal the filter where it is not None, row-major.

    >>> list(filtered_range_index([2, 3], (1, None)))
    [(1, 0), (1, 1), (1, 2)]
    """
    for index in range_index(shape):
        if all(f is None or i == f for i, f in zip(index, filter, strict=True)):
            yield index


def assemble_index_filter(
    index: Sequence[Any], dims: Collection[int], invert: bool = False
) -> tuple[Any, ...]:
    """Return the index with None outside of `dims`; inverted: with None in them.

    >>> assemble_index_filter((4, 3, 2), (1,)), assemble_index_filter((4, 3, 2), (1,), invert=True)
    ((None, 3, None), (4, None, 2))
    """
    return tuple(i if (dim in dims) != invert else None for dim, i in enumerate(index))


def _arrays(*values: Ints) -> tuple[np.ndarray, ...]:
    return tuple(np.atleast_1d(np.asarray(value, dtype=np.int64)) for value in values)


def compute_subtensor_shapes_balanced(global_structure: Any, P_shape: Ints) -> np.ndarray:
    """Return the sizes of every balanced block of a tensor.

    Args:
        global_structure: the whole tensor, or its structure.
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


def cartesian_index_c(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the row-major number of an index.

    >>> cartesian_index_c([2, 3], [1, 0])
    3
    """
    return flat_index(shape, index)


def cartesian_index_f(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the column-major number of an index.

    >>> cartesian_index_f([2, 3], [1, 0])
    1
    """
    return flat_index(shape[::-1], index[::-1])

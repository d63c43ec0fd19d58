"""DistDL's `nn.mixins.halo_mixin`: how wide the halos of a rank are, and what it sends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...utilities.slicing import Ints, compute_start_index, compute_stop_index, compute_subshape
from ...utilities.tensor_decomposition import compute_subtensor_start_indices
from .widths import NoWidths, Widths, exchange_widths


class _Case(NamedTuple):
    """One layer on one tensor; arrays have an entry for each dim."""

    x: np.ndarray
    kernel_size: np.ndarray
    stride: np.ndarray
    padding: np.ndarray
    dilation: np.ndarray
    parts: np.ndarray
    subtensor_shapes: np.ndarray | None


class HaloMixin:
    """Halos towards the nearest neighbours; for use with `ConvMixin` or `PoolingMixin`."""

    _compute_min_input_range: Any
    _compute_max_input_range: Any

    def _compute_exchange_info(
        self,
        x_global_shape: Ints,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        partition_active: bool,
        partition_shape: Ints,
        partition_index: Ints | None,
        subtensor_shapes: np.ndarray | None = None,
    ) -> Widths | NoWidths:
        """Return halo widths, those received, those sent, and which points to compute with.

        Each is an array `(dim, 2)`; four times None on an inactive rank. The last one is relative
        to the block with its halos.

        Args:
            x_global_shape: of the whole input.
            kernel_size: of the last dims, as many as are given; likewise the next three.
            partition_active: whether this rank holds a block.
            partition_shape: number of ranks in each dim.
            partition_index: own place.
            subtensor_shapes: sizes of all blocks where they are not balanced.
        """
        if not partition_active or partition_index is None:
            return None, None, None, None
        x = np.atleast_1d(np.asarray(x_global_shape, dtype=np.int64))
        case = _Case(
            x,
            _filled(kernel_size, len(x), 1),
            _filled(stride, len(x), 1),
            _filled(padding, len(x), 0),
            _filled(dilation, len(x), 1),
            np.atleast_1d(partition_shape),
            subtensor_shapes,
        )
        index = np.atleast_1d(partition_index)
        return exchange_widths(
            lambda place: self._signed_halo(case, place),
            index,
            case.parts,
            _block(case, index)[1],
            cuts_right=subtensor_shapes is not None,
        )

    def _signed_halo(self, case: _Case, index: np.ndarray) -> np.ndarray:
        """Return left and right halo of a rank; negative: own points that it does not need."""
        start, size = _block(case, index)
        reach = case.dilation * (case.kernel_size - 1)
        y = (case.x + 2 * case.padding - reach - 1) // case.stride + 1
        window = (case.kernel_size, case.stride, case.padding, case.dilation)
        first = compute_start_index(case.parts, index, y)
        after = compute_stop_index(case.parts, index, y)
        low = np.maximum(self._compute_min_input_range(first, *window), 0)
        high = np.minimum(self._compute_max_input_range(after - 1, *window), case.x - 1) + 1
        # A rank without outputs needs nothing: all of its points are cut off at the left.
        idle = first == after
        left = np.where(idle, -size, start - low)
        return np.stack([left, np.where(idle, 0, high - (start + size))], axis=1)


def _block(case: _Case, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if case.subtensor_shapes is None:
        start = compute_start_index(case.parts, index, case.x)
        return start, compute_subshape(case.parts, index, case.x)
    at = tuple(int(i) for i in index)
    starts = compute_subtensor_start_indices(case.subtensor_shapes)
    return starts[at], case.subtensor_shapes[at]


def _filled(values: Ints, dims: int, missing: int) -> np.ndarray:
    """Return the values with `missing` for the leading dims that have none."""
    given = np.atleast_1d(np.asarray(values, dtype=np.int64))
    return np.concatenate([np.full(dims - len(given), missing, dtype=np.int64), given])

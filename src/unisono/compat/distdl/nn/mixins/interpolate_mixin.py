"""DistDL's `nn.mixins.interpolate_mixin`: the inputs under the outputs of an upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from unisono.topology.resample import Taps, resample_taps

from ...backends.mpi.partition import MPIPartition
from ...utilities.slicing import compute_start_index, compute_stop_index, compute_subshape
from ...utilities.torch import TensorStructure
from .widths import NoWidths, Widths, exchange_widths

_KINDS = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}
Scale = float | Sequence[float] | None


class InterpolateMixin:
    """Inputs of an output, dim by dim; batch and channels are not resampled."""

    def _compute_needed_start(
        self,
        y_global_idx: Any,
        x_global_shape: Any,
        y_global_shape: Any,
        scale_factor: Scale,
        mode: str,
        align_corners: bool,
        double: bool = False,
    ) -> np.ndarray:
        """Return the first input that the output at `y_global_idx` reads, in each dim.

        `double` is for values of float64, of which torch may take another nearest point.
        """
        sizes = y_global_idx, x_global_shape, y_global_shape
        taps = _taps(*sizes, scale_factor, mode, align_corners, double)
        return np.array([own.points[0] for own in taps])

    def _compute_needed_stop(
        self,
        y_global_idx: Any,
        x_global_shape: Any,
        y_global_shape: Any,
        scale_factor: Scale,
        mode: str,
        align_corners: bool,
        double: bool = False,
    ) -> np.ndarray:
        """Return the input after the last one that the output at `y_global_idx` reads."""
        sizes = y_global_idx, x_global_shape, y_global_shape
        taps = _taps(*sizes, scale_factor, mode, align_corners, double)
        return np.array([own.points[-1] + 1 for own in taps])

    def _compute_exchange_info(
        self,
        P_x: MPIPartition,
        x_structure: TensorStructure,
        y_structure: TensorStructure,
        scale_factor: Scale,
        mode: str,
        align_corners: bool,
    ) -> Widths | NoWidths:
        """Return halo widths, those received, those sent, and which points to compute with.

        Each is an array `(dim, 2)`; four times None on an inactive rank. Input and output are in
        balanced blocks.
        """
        if not P_x.active or P_x.index is None:
            return None, None, None, None
        x, y = (np.array(s.shape, dtype=np.int64) for s in (x_structure, y_structure))
        # Named only where it matters, for classes with DistDL's own signature of the two.
        double = {"double": True} if x_structure.dtype == torch.float64 else {}

        def signed_halo(index: np.ndarray) -> np.ndarray:
            first = compute_start_index(P_x.shape, index, y)
            after = compute_stop_index(P_x.shape, index, y)
            start = compute_start_index(P_x.shape, index, x)
            stop = compute_stop_index(P_x.shape, index, x)
            idle = first == after
            rest = (x, y, scale_factor, mode, align_corners)
            low = self._compute_needed_start(np.where(idle, 0, first), *rest, **double)
            high = self._compute_needed_stop(np.where(idle, 0, after - 1), *rest, **double)
            left = np.where(idle, start - stop, start - low)
            return np.stack([left, np.where(idle, 0, high - stop)], axis=1)

        index = P_x.index
        size = compute_subshape(P_x.shape, index, x)
        return exchange_widths(signed_halo, index, P_x.shape, size, cuts_right=True)


def _taps(
    index: Any,
    x: Any,
    y: Any,
    scale_factor: Scale,
    mode: str,
    align_corners: bool,
    double: bool,
) -> list[Taps]:
    """Return inputs and weights of one output in each dim."""
    dims = len(x)
    given = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * (dims - 2)
    kind = _KINDS.get(mode, mode)
    found = [Taps((int(i),), (1.0,)) for i in index[:2]]
    for dim in range(2, dims):
        sizes = int(index[dim]), int(x[dim]), int(y[dim])
        aligned = align_corners and not kind.startswith("nearest")
        scale = given[dim - 2]
        found.append(resample_taps(*sizes, kind, scale=scale, align_corners=aligned, double=double))
    return found

"""What a rank receives, sends and computes with, from the halos of itself and its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Widths = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Halo widths, those received, those sent, and the needed range; each of shape `(dim, 2)`."""
NoWidths = tuple[None, None, None, None]
"""The same on an inactive rank."""


def exchange_widths(
    signed_halo: Callable[[np.ndarray], np.ndarray],
    index: np.ndarray,
    parts: np.ndarray,
    size: np.ndarray,
    *,
    cuts_right: bool,
) -> Widths:
    """Return the widths of one rank towards its nearest neighbours.

    Args:
        signed_halo: left and right halo of the rank at an index, `(dim, 2)`; negative: own points
            that it does not need.
        index: own place.
        parts: number of ranks in each dim.
        size: sizes of the own block.
        cuts_right: whether points that are not needed at the right are left out.
    """
    signed = signed_halo(index)
    halo = np.maximum(signed, 0)
    send = np.zeros_like(halo)
    for dim in range(len(parts)):
        step = (np.arange(len(parts)) == dim).astype(np.int64)
        if index[dim] > 0:
            send[dim, 0] = max(0, signed_halo(index - step)[dim, 1])
        if index[dim] + 1 < parts[dim]:
            send[dim, 1] = max(0, signed_halo(index + step)[dim, 0])
    start = -np.minimum(signed[:, 0], 0)
    stop = size + halo[:, 0] + (signed if cuts_right else halo)[:, 1]
    return halo, halo.copy(), send, np.stack([start, np.maximum(start, stop)], axis=1)

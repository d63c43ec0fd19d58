"""Whether a tensor that should be replicated is: a comparison over ranks, for debugging."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm import Communicator

TOLERANCE = 1e-6
"""Largest difference that passes, relative to the largest value."""


def difference_over_ranks(x: Tensor, comm: Communicator) -> str | None:
    """Return in words how far the ranks' tensors are apart, None if they are equal. Collective.

    The same answer on every rank.
    """
    if comm.size == 1 or x.numel() == 0:
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        values = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        values = values.double()
        highest, lowest = comm.all_reduce(values, "max"), comm.all_reduce(values, "min")
        apart = float((highest - lowest).max())
        scale = float(torch.maximum(highest.abs(), lowest.abs()).max())
    if apart <= TOLERANCE * scale:
        return None
    return f"values differ by {apart:.3g}, the largest is {scale:.3g}"

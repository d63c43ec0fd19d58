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
        kinds = _kinds(values)  # a difference of two infinities, or with nan, is no number
        finite = torch.where(kinds == 0, values, 0.0)
        sent = torch.stack([finite, kinds])
        highest, lowest = comm.all_reduce(sent, "max"), comm.all_reduce(sent, "min")
        apart = float((highest[0] - lowest[0]).max())
        scale = float(torch.maximum(highest[0].abs(), lowest[0].abs()).max())
        odd = int((highest[1] != lowest[1]).sum())
    if odd:
        return f"{odd} of {values.numel()} values are nan or infinite on some ranks only"
    if apart <= TOLERANCE * scale:
        return None
    return f"values differ by {apart:.3g}, the largest is {scale:.3g}"


def _kinds(values: Tensor) -> Tensor:
    """Return 0 for each number, 1 and 2 for the infinities, 3 for nan."""
    infinite = values.isposinf().double() + 2 * values.isneginf().double()
    return infinite + 3 * values.isnan().double()

"""Tensors as plain bytes: what travels when a tensor is only moved."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view."""
    flat = x.reshape(-1)
    if flat.dtype == torch.uint8:
        return flat
    # A single element may have any stride and still count as contiguous.
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


def dense(x: Tensor) -> Tensor:
    """Return `x` with its values laid out in order; `x` itself where they are."""
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return x.resolve_conj().resolve_neg().contiguous()

"""DistDL's `utilities`: index arithmetic, structures of tensors, and small things around them."""

from __future__ import annotations

from . import debug, dtype, index_tricks, misc, slicing, tensor_decomposition, torch

__all__ = [
    "debug",
    "dtype",
    "index_tricks",
    "misc",
    "slicing",
    "tensor_decomposition",
    "torch",
]

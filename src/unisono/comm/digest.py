"""Digests of tensors: numbers that differ if the bits do, made where the tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ORDERED = 4096
"""So many words of a tensor also count by their place."""


@torch.no_grad()
def digest_of(x: Tensor, most: int | None = None, phase: int = 0) -> Tensor:
    """Return the digest of a tensor, a number of 64 bits on its device. The host does not wait.

    It is the sum of all words, and a weighted sum of some of them, which knows their order.

    Args:
        x: any tensor with data.
        most: look at about so many words, evenly spread; None: at all of them.
        phase: which ones. As it grows, every word has its turn.
    """
    words = _words(x.detach())
    if most is not None and words.numel() > most:
        stride = words.numel() // most
        words = words[phase % stride :: stride]
    some = words[:: words.numel() // _ORDERED + 1].to(torch.int64)
    places = torch.arange(1, 2 * some.numel(), 2, device=some.device)
    found = words.sum(dtype=torch.int64) * 31 + (some * places).sum()
    return found ^ (found >> 32)  # the lower bits of many floats are all zero


def digest(x: Tensor, most: int | None = None) -> int:
    """Return the digest of a tensor as a number; waits for its device."""
    return 0 if x.is_meta else int(digest_of(x, most))


def _words(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, as wide as its memory allows."""
    if x.layout != torch.strided:
        x = x.coalesce().values() if x.layout == torch.sparse_coo else x.to_dense()
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    flat = x.contiguous().reshape(-1)
    size = flat.element_size()
    begin, length = flat.storage_offset() * size, flat.numel() * size
    if begin % 8 == 0 and length % 8 == 0 and flat.device.type != "mps":
        return flat.view(torch.int64)
    return flat.view(_WORDS[size])

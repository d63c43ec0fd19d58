"""Digests of tensors: numbers that differ if the bits do, made where the tensor lies."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ORDERED = 65536
"""Number of words that also count by their place."""
_RUN = 64
"""Length of a run of neighbours in a sample."""


def digest_of(x: Tensor, most: int | None = None, phase: int = 0) -> Tensor:
    """Return the digest of a tensor, a number of 64 bits on its device. The host does not wait.

    It is the sum of all words, and a weighted sum of some of them, which knows their order.

    Args:
        x: any tensor with data.
        most: number of words to look at, spread evenly; None: all of them.
        phase: which ones. As it grows, every word has its turn.
    """
    return digests_of([x], most, phase)[0]


@torch.no_grad()
def digests_of(tensors: Iterable[Tensor], most: int | None = None, phase: int = 0) -> list[Tensor]:
    """Return one digest for all tensors of a device, of each device. See `digest_of`."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for x in tensors:
        words = _words(x.detach())
        if most is not None and words.numel() > most:
            words = _sample(words, most, phase)
        by_device.setdefault(words.device, []).append(words)
    return [_mixed(words) for words in by_device.values()]


def _sample(words: Tensor, most: int, phase: int) -> Tensor:
    """Return about `most` words, in runs of neighbours: a single one costs a cache line."""
    count, run = words.numel(), min(_RUN, most)
    rest = count % run
    stride = -(-count // most)
    begin = rest * (phase % 2)  # so that the last words have their turn, too
    runs = words[begin : begin + count - rest].view(-1, run)
    return runs[phase // 2 % stride :: stride].reshape(-1)


def _mixed(parts: list[Tensor]) -> Tensor:
    """Return the digest of words of one device."""
    words = parts[0] if len(parts) == 1 else torch.cat(parts)
    count = words.numel()
    some = words[:: count // _ORDERED + 1] if count > _ORDERED else words
    mixed = (_places(words.device)[: some.numel()] * some).sum()
    if some is not words:
        mixed = mixed + words.sum(dtype=torch.int64) * 31
    return mixed ^ (mixed >> 32)  # the lower bits of many floats are all zero


@functools.lru_cache(maxsize=16)
def _places(device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.arange(1, 2 * _ORDERED + 1, 2, device=device)


def digest(x: Tensor, most: int | None = None, phase: int = 0) -> int:
    """Return the digest of a tensor as a number; waits for its device."""
    return 0 if x.is_meta else int(digest_of(x, most, phase))


def _words(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, as wide as its memory allows."""
    if x.layout != torch.strided:
        x = x.coalesce().values() if x.layout == torch.sparse_coo else x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    flat = x.resolve_neg().reshape(-1)
    if not flat.is_contiguous():
        flat = flat.contiguous()
    size = flat.element_size()
    begin, length = flat.storage_offset() * size, flat.numel() * size
    if begin % 8 == 0 and length % 8 == 0 and flat.device.type != "mps":
        return flat.view(torch.int64)
    return flat.view(_WORDS[size])

"""All ranks of a plan in one process: windows are filled and gradients sent home by plain copies.

Follows the plans to the letter (pack in message order, unpack in message order), so a plan that
two ranks see differently gives wrong numbers here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from unisono.topology.halo import HaloPiece, HaloPlan, Message


def slices(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Return the slices of a box."""
    return tuple(slice(start, stop) for start, stop in box)


def indices(cuts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return all indices of the grid that the cuts make, row-major."""
    return list(product(*(range(len(own) - 1) for own in cuts)))


def cut_blocks(x: Tensor, cuts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return every rank's block of `x`, row-major."""
    return [
        x[tuple(slice(own[i], own[i + 1]) for own, i in zip(cuts, index, strict=True))]
        for index in indices(cuts)
    ]


def join_blocks(blocks: Sequence[Tensor], grid: Sequence[int]) -> Tensor:
    """Return the tensor of which these are the blocks, row-major."""
    joined = list(blocks)
    for dim in reversed(range(len(grid))):
        size = grid[dim]
        joined = [torch.cat(joined[i : i + size], dim) for i in range(0, len(joined), size)]
    return joined[0]


def _pack(block: Tensor, message: Message) -> Tensor:
    return torch.cat([block[piece.source_slices].reshape(-1) for piece in message.pieces])


def write(window: Tensor, piece: HaloPiece, values: Tensor) -> None:
    """Write a piece into a window."""
    window[piece.dest_slices] = values.reshape(piece.shape).flip(piece.flips)


def _unpack(window: Tensor, message: Message, flat: Tensor) -> None:
    parts = flat.split([piece.numel for piece in message.pieces])
    for piece, part in zip(message.pieces, parts, strict=True):
        write(window, piece, part)


def _back(window: Tensor, piece: HaloPiece) -> Tensor:
    g = window[piece.dest_slices]
    if piece.repeats:
        g = g.sum(piece.repeats, keepdim=True)
    return g.flip(piece.flips)


def fill_windows(blocks: Sequence[Tensor], plans: Sequence[HaloPlan]) -> list[Tensor]:
    """Return every rank's window."""
    sent = {
        (plan.rank, message.peer): _pack(block, message)
        for plan, block in zip(plans, blocks, strict=True)
        for message in plan.sends
    }
    windows: list[Tensor] = []
    for plan, block in zip(plans, blocks, strict=True):
        window = torch.full(plan.window_shape, plan.fill, dtype=block.dtype)
        for piece in plan.local:
            write(window, piece, block[piece.source_slices])
        for message in plan.recvs:
            flat = sent.pop((message.peer, plan.rank))
            assert flat.numel() == message.numel
            _unpack(window, message, flat)
        windows.append(window)
    assert not sent, f"messages nobody receives: {sorted(sent)}"
    return windows


def add_windows(windows: Sequence[Tensor], plans: Sequence[HaloPlan]) -> list[Tensor]:
    """Return every rank's block of gradients: the adjoint of `fill_windows`."""
    returned = {
        (plan.rank, message.peer): torch.cat(
            [_back(window, piece).reshape(-1) for piece in message.pieces]
        )
        for plan, window in zip(plans, windows, strict=True)
        for message in plan.recvs
    }
    blocks: list[Tensor] = []
    for plan, window in zip(plans, windows, strict=True):
        block = torch.zeros(plan.block_shape, dtype=window.dtype)
        for piece in plan.local:
            block[piece.source_slices] += _back(window, piece)
        for message in plan.sends:
            flat = returned.pop((message.peer, plan.rank))
            parts = flat.split([piece.numel for piece in message.pieces])
            for piece, part in zip(message.pieces, parts, strict=True):
                block[piece.source_slices] += part.reshape(piece.shape)
        blocks.append(block)
    assert not returned
    return blocks

"""Collectives that only move: broadcast, gathers, scatter, all_to_all, barrier.

Everything travels as bytes, so every dtype does. Small blocks go together in one vector call of
MPI; where only two ranks know the size of a large block, it goes alone, as a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm.algorithms import MAX_PAIRWISE_RANKS
from unisono.comm.torch_engine import bytes_of
from unisono.comm.transports.mpi.line import MAX_BYTES, Line

ALONE_BYTES = 1024 * 1024
"""A block above this size travels alone."""


def nbytes_of(x: Tensor) -> int:
    """Return the number of bytes of the elements of `x`."""
    return x.numel() * x.element_size()


def is_one_stretch(blocks: Sequence[Tensor]) -> bool:
    """Whether the blocks lie behind each other in memory, short enough to be counted by MPI."""
    present = [block for block in blocks if block.numel()]
    ends = [block.data_ptr() + nbytes_of(block) for block in present]
    follows = all(end == block.data_ptr() for end, block in zip(ends, present[1:], strict=False))
    return follows and sum(map(nbytes_of, present)) <= MAX_BYTES


class Blocks:
    """One block a rank, as a vector call of MPI takes them: where they are, or staged.

    Args:
        line: the group's line.
        tensors: the blocks.
        counts: bytes of each that take part; 0 leaves a block out.
        begin: first byte of each block that takes part.
    """

    def __init__(
        self, line: Line, tensors: Sequence[Tensor], counts: Sequence[int], begin: int = 0
    ) -> None:
        self._tensors = tensors
        self._counts = counts
        self._begin = begin
        if is_one_stretch(tensors):
            self._stage: Tensor | None = None
            sizes = [nbytes_of(x) for x in tensors]
            first = next((x for x in tensors if x.numel()), tensors[0])
            line.hold(tensors)
            memory = line.memory(first, 0, sum(sizes))
            places = [place + begin for place in itertools.accumulate(sizes[:-1], initial=0)]
        else:
            self._stage = torch.empty(sum(counts), dtype=torch.uint8)
            memory = line.memory(self._stage)
            places = list(itertools.accumulate(counts[:-1], initial=0))
        places = [place if count else 0 for place, count in zip(places, counts, strict=True)]
        self.spec: list[Any] = [memory, (list(counts), places), line.mpi.BYTE]

    def load(self) -> None:
        """Copy what is to be sent to the stage, if there is one."""
        for part, staged in self._staged():
            staged.copy_(part)

    def deliver(self) -> None:
        """Copy what was received from the stage, if there is one."""
        for part, staged in self._staged():
            part.copy_(staged)

    def _staged(self) -> list[tuple[Tensor, Tensor]]:
        if self._stage is None:
            return []
        begin = self._begin
        pieces = self._stage.split(list(self._counts))
        return [
            (bytes_of(x)[begin : begin + count], piece)
            for x, count, piece in zip(self._tensors, self._counts, pieces, strict=True)
            if count
        ]


def broadcast(line: Line, x: Tensor, src: int) -> None:
    """Replace `x` on every rank by `x` of `src`."""
    for begin, length in line.pieces(nbytes_of(x)):
        line.start(line.comm.Ibcast, [line.memory(x, begin, length), line.mpi.BYTE], src)
    line.finish()


def all_gather(line: Line, outs: Sequence[Tensor], x: Tensor) -> None:
    """Fill `outs[q]` with `x` of rank `q`.

    Large blocks go alone among few ranks, since that needs no stage; among many, MPI's way of
    passing them on costs each rank less.
    """
    sizes = [nbytes_of(out) for out in outs]
    if line.size <= MAX_PAIRWISE_RANKS:
        _receive_large(line, outs)
        if sizes[line.rank] > ALONE_BYTES:
            _copy(outs[line.rank], x)
            for peer in range(line.size):
                if peer != line.rank:
                    line.send_alone(x, peer)
        sizes = [0 if size > ALONE_BYTES else size for size in sizes]
    if sizes[line.rank] and x.data_ptr() == outs[line.rank].data_ptr():
        x = x.clone()  # MPI wants all ranks, or none, to work in place
    share = max(1, line.chunk_bytes // line.size)
    for begin in range(0, max(sizes), share):
        counts = [min(max(size - begin, 0), share) for size in sizes]
        received = Blocks(line, outs, counts, begin)
        sent = [line.memory(x, min(begin, nbytes_of(x)), counts[line.rank]), line.mpi.BYTE]
        line.start(line.comm.Iallgatherv, sent, received.spec)
        line.finish()
        received.deliver()
    line.finish()


def all_to_all(line: Line, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
    """Fill `outs[q]` with `ins[r]` of rank `q`."""
    _copy(outs[line.rank], ins[line.rank])
    received = Blocks(line, outs, _joint(line, outs))
    sent = Blocks(line, ins, _joint(line, ins))
    _receive_large(line, outs)
    _send_large(line, ins)
    sent.load()
    line.start(line.comm.Ialltoallv, sent.spec, received.spec)
    line.finish()
    received.deliver()


def gather(line: Line, outs: Sequence[Tensor] | None, x: Tensor, dst: int) -> None:
    """Fill `outs[q]` of `dst` with `x` of rank `q`."""
    if outs is None:
        is_large = nbytes_of(x) > ALONE_BYTES
        if is_large:
            line.send_alone(x, dst)
        block = [line.memory(x, 0, 0 if is_large else nbytes_of(x)), line.mpi.BYTE]
        line.start(line.comm.Igatherv, block, None, dst)
        line.finish()
        return
    _copy(outs[dst], x)
    received = Blocks(line, outs, _joint(line, outs))
    _receive_large(line, outs)
    nothing = [line.memory(x, 0, 0), line.mpi.BYTE]
    line.start(line.comm.Igatherv, nothing, received.spec, dst)
    line.finish()
    received.deliver()


def scatter(line: Line, out: Tensor, ins: Sequence[Tensor] | None, src: int) -> None:
    """Fill `out` of rank `r` with `ins[r]` of `src`."""
    if ins is None:
        is_large = nbytes_of(out) > ALONE_BYTES
        if is_large:
            line.receive_alone(out, src)
        block = [line.memory(out, 0, 0 if is_large else nbytes_of(out)), line.mpi.BYTE]
        line.start(line.comm.Iscatterv, None, block, src)
        line.finish()
        return
    _copy(out, ins[src])
    sent = Blocks(line, ins, _joint(line, ins))
    _send_large(line, ins)
    sent.load()
    nothing = [line.memory(out, 0, 0), line.mpi.BYTE]
    line.start(line.comm.Iscatterv, sent.spec, nothing, src)
    line.finish()


def barrier(line: Line) -> None:
    """Return when every rank has come."""
    line.start(line.comm.Ibarrier)
    line.finish()


def all_gather_ints(line: Line, values: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tuples of all ranks, in rank order."""
    mine = np.array(values, dtype=np.int64)
    everybody = np.empty((line.size, len(mine)), dtype=np.int64)
    line.start(line.comm.Iallgather, [mine, line.mpi.INT64_T], [everybody, line.mpi.INT64_T])
    line.finish()
    return [tuple(row) for row in everybody.tolist()]


def _joint(line: Line, blocks: Sequence[Tensor]) -> list[int]:
    """Return the bytes of each block that goes with the others; the own block stays here."""
    sizes = [nbytes_of(block) for block in blocks]
    return [
        0 if place == line.rank or size > ALONE_BYTES else size for place, size in enumerate(sizes)
    ]


def _receive_large(line: Line, outs: Sequence[Tensor]) -> None:
    for peer, out in enumerate(outs):
        if peer != line.rank and nbytes_of(out) > ALONE_BYTES:
            line.receive_alone(out, peer)


def _send_large(line: Line, ins: Sequence[Tensor]) -> None:
    for peer, block in enumerate(ins):
        if peer != line.rank and nbytes_of(block) > ALONE_BYTES:
            line.send_alone(block, peer)


def _copy(out: Tensor, block: Tensor) -> None:
    if out.numel() and out.data_ptr() != block.data_ptr():
        bytes_of(out).copy_(bytes_of(block))

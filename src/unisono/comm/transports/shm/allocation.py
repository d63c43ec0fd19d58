"""Making a shared buffer: rank 0 allocates, all map it, or all refuse alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.transports.queued import Refused
from unisono.comm.transports.shm.board import Board, code_of
from unisono.comm.transports.shm.buffers import FIRST, buffer_bytes, region_bytes
from unisono.comm.transports.shm.libc import populate
from unisono.comm.transports.shm.moves import share_texts
from unisono.comm.transports.shm.segment import Segment, Ticket
from unisono.errors import UnisonoError

_MB = 1 << 20


def make_shared_buffer(
    board: Board, shape: Sequence[int], dtype: torch.dtype, *, kind: str, room: float
) -> Tensor:
    """Return zeros that live in shared memory of the group. Collective over the board.

    Args:
        board: the slots of the group.
        shape: the same on all ranks.
        dtype: the same on all ranks.
        kind: kind of segment to make.
        room: bytes of shared memory the group may still take.

    Raises:
        UnisonoError: on all ranks, when the memory is not to be had.
        CollectiveMismatch: on all ranks, when they ask for different buffers.
    """
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    board.meet(board.turn(), code_of("shared_buffer", dtype), nbytes, digest=hash(tuple(shape)))
    if count == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    segment: Segment | None = None
    word, text = "", ""
    if board.rank == 0:
        try:
            segment = _allocate(board.size, nbytes, kind, room)
            word, text = "ok", str(segment.ticket)
        except (OSError, UnisonoError) as error:
            word, text = "no", str(error)
    word, _, text = share_texts(board, f"{word} {text}")[0].partition(" ")
    if word == "no":
        raise Refused(text)
    problem = ""
    if segment is None:
        try:
            segment = Segment.open(Ticket.parse(text))
            populate(segment.address, len(segment.memory))
        except OSError as error:
            problem = f"rank {board.ranks[board.rank]}: {error}"
    problems = [p for p in share_texts(board, problem) if p]
    if segment is not None:
        segment.seal()
    if problems or segment is None:
        raise Refused.because(
            f"shared_buffer({tuple(shape)}, {dtype})",
            "ranks that cannot map it: " + "; ".join(problems),
        )
    board.buffers.add(segment, board.rank, board.size, nbytes)
    offset = FIRST + board.rank * region_bytes(nbytes)
    flat = torch.frombuffer(segment.memory, dtype=dtype, count=count, offset=offset)
    return flat.view(tuple(shape))


def _allocate(size: int, nbytes: int, kind: str, room: float) -> Segment:
    total = buffer_bytes(size, nbytes)
    if total > room:
        raise UnisonoError.because(
            f"a shared buffer of {nbytes / _MB:.1f} MB on each of {size} ranks",
            f"UNISONO_SHM_MAX_MB leaves {max(room, 0) / _MB:.1f} MB to this group",
            f"{size} * {nbytes / _MB:.1f} MB = {total / _MB:.1f} MB",
            "a larger UNISONO_SHM_MAX_MB, or a smaller buffer",
        )
    segment = Segment.create(total, kind=kind, purpose="shared buffer")
    populate(segment.address, total)
    return segment

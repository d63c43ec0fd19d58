"""Collectives that reduce: all_reduce, reduce, reduce_scatter.

Sums run over the ranks in order 0..W-1, each element by one rank, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from unisono.comm.transports.rank_order import Array, Reducer
from unisono.comm.transports.shm.board import SMALL_BYTES, Board, code_of
from unisono.comm.transports.shm.buffers import SharedBuffer
from unisono.comm.transports.shm.libc import memmove
from unisono.comm.transports.shm.moves import place_in_slot
from unisono.comm.transports.shm.rounds import row_place, run_rounds, sizes_of

_BLOCK_BYTES = 2 << 20
"""A block of this size stays in the last cache while it is reduced and copied; smaller ones cost
more in calls than they save."""

_LINE = 64


def all_reduce(board: Board, x: Tensor, reducer: Reducer, dst: int | None = None) -> None:
    """Replace `x` on every rank, or on `dst` only, by the reduction over all ranks."""
    nbytes, pointer = x.numel() * x.element_size(), x.data_ptr()
    verb = "all_reduce" if dst is None else "reduce"
    code = code_of(verb, x.dtype, reducer.number, dst)
    wanted = dst is None or dst == board.rank
    turn = board.turn()
    if nbytes <= SMALL_BYTES and nbytes <= board.slot_bytes:
        memmove(board.address[turn][board.rank], pointer, nbytes)
        board.meet(turn, code, nbytes)
        if wanted and nbytes:
            result = board.private(reducer.storage, nbytes)
            reducer.fill(result, board.views(turn, reducer.storage, nbytes))
            memmove(pointer, board.private_address, nbytes)
        return
    pieces = _Pieces(board, x, reducer, wanted)
    place = board.buffers.place(pointer, nbytes)
    if not place:
        pieces.put(turn, 0)
    places = board.meet(turn, code, nbytes, place=place)
    start = 0
    if places is None:
        pieces.finish(turn, 0)
        start = board.slot_bytes
    elif len(set(places)) == 1 and (found := board.buffers.find(places)) is not None:
        _in_place(board, found[0], found[1][0], nbytes, reducer, dst)
        return
    for begin in range(start, nbytes, board.slot_bytes):
        turn = board.turn()
        pieces.put(turn, begin)
        board.sync.sync()
        pieces.finish(turn, begin)


class _Pieces:
    """A chunk of a tensor is cut into one piece a rank; each rank reduces its own piece.

    The own piece never goes into the slot; its place there is where the reduced piece goes.
    """

    def __init__(self, board: Board, x: Tensor, reducer: Reducer, wanted: bool) -> None:
        self._board = board
        self._reducer = reducer
        self._wanted = wanted
        self._pointer = x.data_ptr()
        self._bytes: Array = reducer.array(x).view(np.uint8)
        self._cuts: dict[int, list[int]] = {}

    def put(self, turn: int, begin: int) -> None:
        """Copy the pieces that others reduce into the own slot."""
        board, rank = self._board, self._board.rank
        length, cuts = self._cut(begin)
        address, pointer = board.address[turn][rank], self._pointer + begin
        if cuts[rank]:
            memmove(address, pointer, cuts[rank])
        if length > cuts[rank + 1]:
            memmove(address + cuts[rank + 1], pointer + cuts[rank + 1], length - cuts[rank + 1])

    def finish(self, turn: int, begin: int) -> None:
        """Reduce the own piece, meet, and take the other ranks' pieces."""
        board, rank, storage = self._board, self._board.rank, self._reducer.storage
        _, cuts = self._cut(begin)
        low, high = cuts[rank], cuts[rank + 1]
        if high > low:
            slots = board.raw[turn]
            parts = [
                (self._bytes[begin + low : begin + high] if peer == rank else slot[low:high]).view(
                    storage
                )
                for peer, slot in enumerate(slots)
            ]
            self._reducer.fill(slots[rank][low:high].view(storage), parts)
            if self._wanted:
                source = board.address[turn][rank] + low
                memmove(self._pointer + begin + low, source, high - low)
        board.sync.sync()
        if self._wanted:
            for peer in range(board.size):
                low, high = cuts[peer], cuts[peer + 1]
                if peer != rank and high > low:
                    source = board.address[turn][peer] + low
                    memmove(self._pointer + begin + low, source, high - low)

    def _cut(self, begin: int) -> tuple[int, list[int]]:
        """Return the length of the chunk at `begin` and where its pieces begin and end."""
        length = min(self._board.slot_bytes, len(self._bytes) - begin)
        cuts = self._cuts.get(length)
        if cuts is None:
            cuts = self._cuts[length] = cut(length, self._board.size)
        return length, cuts


def _in_place(
    board: Board,
    buffer: SharedBuffer,
    offset: int,
    nbytes: int,
    reducer: Reducer,
    dst: int | None,
) -> None:
    """Reduce tensors that lie at one place of a shared buffer: no copy but of the result."""
    rank, size, storage = board.rank, board.size, reducer.storage
    cuts = cut(nbytes, size)
    regions = [buffer.region(peer, offset, nbytes) for peer in range(size)]
    # With one destination the other ranks' tensors stay as they are.
    scratch = np.empty(min(_BLOCK_BYTES, nbytes), np.uint8) if dst is not None else None
    targets = range(1, size) if dst is None else (dst,)
    for low in range(cuts[rank], cuts[rank + 1], _BLOCK_BYTES):
        high = min(low + _BLOCK_BYTES, cuts[rank + 1])
        blocks = [region[low:high] for region in regions]
        result = blocks[0] if scratch is None else scratch[: high - low]
        reducer.fill(result.view(storage), [block.view(storage) for block in blocks])
        for peer in targets:
            np.copyto(blocks[peer], result)
    board.sync.sync()


def reduce_scatter(
    board: Board, out: Tensor, ins: Sequence[Tensor], reducer: Reducer, alike: int = 0
) -> None:
    """Fill `out` of rank `r` with the reduction over ranks of `ins[r]`; `alike` must agree."""
    rank, size, storage = board.rank, board.size, reducer.storage
    sizes = sizes_of(ins)
    sources = [block.data_ptr() for block in ins]
    if sum(sizes) <= min(SMALL_BYTES, board.slot_bytes):
        _small_reduce_scatter(board, out, sizes, sources, reducer, alike)
        return
    share = board.slot_bytes // (size - 1) // _LINE * _LINE
    target, own = reducer.array(out).view(np.uint8), reducer.array(ins[rank]).view(np.uint8)
    if size > 2 and out.data_ptr() == sources[rank]:
        own = own.copy()

    def fill(address: int, number: int) -> None:
        start = number * share
        for peer, nbytes in enumerate(sizes):
            if peer != rank and nbytes > start:
                memmove(
                    address + place_in_slot(rank, peer) * share,
                    sources[peer] + start,
                    min(share, nbytes - start),
                )

    def drain(turn: int, number: int) -> None:
        start = number * share
        length = min(share, sizes[rank] - start)
        if length <= 0:
            return
        parts: list[Array] = []
        for peer, slot in enumerate(board.raw[turn]):
            if peer == rank:
                parts.append(own[start : start + length].view(storage))
            else:
                first = place_in_slot(peer, rank) * share
                parts.append(slot[first : first + length].view(storage))
        reducer.fill(target[start : start + length].view(storage), parts)

    def direct(buffer: SharedBuffer, offsets: list[int]) -> None:
        before, nbytes = sum(sizes[:rank]), sizes[rank]
        regions = [
            own if peer == rank else buffer.region(peer, offset + before, nbytes)
            for peer, offset in enumerate(offsets)
        ]
        for low in range(0, nbytes, _BLOCK_BYTES):
            high = min(low + _BLOCK_BYTES, nbytes)
            parts = [region[low:high].view(storage) for region in regions]
            reducer.fill(target[low:high].view(storage), parts)

    run_rounds(
        board,
        code_of("reduce_scatter", out.dtype, reducer.number),
        sum(sizes),
        digest=hash((alike, *sizes)),
        place=row_place(board, ins, sizes),
        fill=fill,
        rounds=lambda _: max(1, -(-max(sizes) // share)),
        drain=drain,
        direct=direct,
    )


def _small_reduce_scatter(
    board: Board, out: Tensor, sizes: list[int], sources: list[int], reducer: Reducer, alike: int
) -> None:
    """Copy all blocks in, one after the other, and reduce the own column."""
    turn, total = board.turn(), sum(sizes)
    address = board.address[turn][board.rank]
    for size, source in zip(sizes, sources, strict=True):
        memmove(address, source, size)
        address += size
    code = code_of("reduce_scatter", out.dtype, reducer.number)
    board.meet(turn, code, total, digest=hash((alike, *sizes)))
    own, before = sizes[board.rank], sum(sizes[: board.rank])
    if own:
        blocks = board.views(turn, reducer.storage, own, before)
        reducer.fill(board.private(reducer.storage, own), blocks)
        memmove(out.data_ptr(), board.private_address, own)


def cut(nbytes: int, parts: int) -> list[int]:
    """Return where `parts` pieces of about equal length begin and end, at whole cache lines.

    >>> cut(200, 2)
    [0, 128, 200]
    """
    share = -(-nbytes // (parts * _LINE)) * _LINE
    return [min(nbytes, i * share) for i in range(parts + 1)]

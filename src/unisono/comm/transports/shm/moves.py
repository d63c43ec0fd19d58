"""Collectives that move bytes unchanged: broadcast, gathers, scatters, all-to-all, barrier.

All are called by every rank of the board with contiguous tensors. Blocks may have any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from unisono.comm.transports.shm.board import Board, code_of
from unisono.comm.transports.shm.buffers import SharedBuffer
from unisono.comm.transports.shm.libc import memmove
from unisono.comm.transports.shm.rounds import row_place, run_rounds, sizes_of

_BARRIER = code_of("barrier")
_INTS = code_of("all_gather_ints")
_LINE = 64


def barrier(board: Board) -> None:
    """Return when all ranks have come."""
    board.meet(board.turn(), _BARRIER, 0)


def broadcast(board: Board, x: Tensor, src: int) -> None:
    """Replace `x` by `x` of `src`."""
    rank, slot = board.rank, board.slot_bytes
    nbytes, pointer = x.numel() * x.element_size(), x.data_ptr()

    def fill(address: int, number: int) -> None:
        if rank == src:
            start = number * slot
            memmove(address, pointer + start, min(slot, nbytes - start))

    def drain(turn: int, number: int) -> None:
        if rank != src:
            start = number * slot
            memmove(pointer + start, board.address[turn][src], min(slot, nbytes - start))

    def direct(buffer: SharedBuffer, offsets: list[int]) -> None:
        if rank != src:
            memmove(pointer, buffer.address(src, offsets[src]), nbytes)

    run_rounds(
        board,
        code_of("broadcast", x.dtype, root=src),
        nbytes,
        place=board.buffers.place(pointer, nbytes),
        fill=fill,
        rounds=lambda _: _rounds(nbytes, slot),
        drain=drain,
        direct=direct,
    )


def all_gather(board: Board, outs: Sequence[Tensor], x: Tensor, alike: int = 0) -> None:
    """Fill `outs[q]` with `x` of rank `q`; `alike` must be the same on all ranks."""
    rank, slot = board.rank, board.slot_bytes
    sizes = sizes_of(outs)
    targets = [out.data_ptr() for out in outs]
    pointer, nbytes = x.data_ptr(), sizes[rank]

    def fill(address: int, number: int) -> None:
        start = number * slot
        if nbytes > start:
            memmove(address, pointer + start, min(slot, nbytes - start))
        if number == 0 and targets[rank] != pointer:
            memmove(targets[rank], pointer, nbytes)

    def drain(turn: int, number: int) -> None:
        start = number * slot
        for peer, size in enumerate(sizes):
            if peer != rank and size > start:
                source = board.address[turn][peer]
                memmove(targets[peer] + start, source, min(slot, size - start))

    def direct(buffer: SharedBuffer, offsets: list[int]) -> None:
        for peer, size in enumerate(sizes):
            if peer != rank or targets[rank] != pointer:
                memmove(targets[peer], buffer.address(peer, offsets[peer]), size)

    run_rounds(
        board,
        code_of("all_gather", x.dtype),
        nbytes,
        digest=hash((alike, *sizes)),
        place=board.buffers.place(pointer, nbytes),
        same_size=False,
        fill=fill,
        rounds=lambda _: _rounds(max(sizes), slot),
        drain=drain,
        direct=direct,
    )


def all_to_all(board: Board, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
    """Fill `outs[q]` with `ins[r]` of rank `q`."""
    rank, size = board.rank, board.size
    sent, expected = sizes_of(ins), sizes_of(outs)
    sources, targets = [t.data_ptr() for t in ins], [t.data_ptr() for t in outs]
    share = _share(board)
    peers = [q for q in range(size) if q != rank]
    board.write_sizes(sent, expected)
    table: list[list[int]] = []

    def fill(address: int, number: int) -> None:
        start = number * share
        for peer in peers:
            if sent[peer] > start:
                memmove(
                    address + place_in_slot(rank, peer) * share,
                    sources[peer] + start,
                    min(share, sent[peer] - start),
                )

    def rounds(turn: int) -> int:
        table[:] = board.read_sizes(turn)
        most = 0
        for src in range(size):
            for dst in range(size):
                sends, expects = table[src][dst], table[dst][size + src]
                if sends != expects:
                    raise board.mismatch(
                        turn,
                        f"rank {board.ranks[src]} sends {sends} bytes to rank "
                        f"{board.ranks[dst]}, which expects {expects}",
                    )
                if sends > most and src != dst:
                    most = sends
        return _rounds(most, share)

    def drain(turn: int, number: int) -> None:
        start = number * share
        if number == 0:
            memmove(targets[rank], sources[rank], sent[rank])
        for peer in peers:
            if expected[peer] > start:
                source = board.address[turn][peer] + place_in_slot(peer, rank) * share
                memmove(targets[peer] + start, source, min(share, expected[peer] - start))

    def direct(buffer: SharedBuffer, offsets: list[int]) -> None:
        for peer in range(size):
            source = buffer.address(peer, offsets[peer] + sum(table[peer][:rank]))
            memmove(targets[peer], source, expected[peer])

    run_rounds(
        board,
        code_of("all_to_all", ins[0].dtype),
        sum(sent),
        place=row_place(board, ins, sent),
        same_size=False,
        fill=fill,
        rounds=rounds,
        drain=drain,
        direct=direct,
    )


def gather(board: Board, outs: Sequence[Tensor] | None, x: Tensor, dst: int) -> None:
    """Fill `outs[q]` of `dst` with `x` of rank `q`."""
    rank, slot = board.rank, board.slot_bytes
    pointer, nbytes = x.data_ptr(), x.numel() * x.element_size()
    expected = sizes_of(outs) if outs is not None else []
    targets = [out.data_ptr() for out in outs] if outs is not None else []
    if rank == dst:
        board.write_sizes(expected)

    def fill(address: int, number: int) -> None:
        start = number * slot
        if rank != dst and nbytes > start:
            memmove(address, pointer + start, min(slot, nbytes - start))

    def rounds(turn: int) -> int:
        sizes = board.sizes(turn)
        wanted = board.read_sizes(turn)[dst][: board.size]
        if wanted != sizes:
            raise board.mismatch(
                turn,
                f"rank {board.ranks[dst]} gathers blocks of {wanted} bytes, "
                f"but the ranks bring {sizes}",
            )
        return _rounds(max(n for q, n in enumerate(sizes) if q != dst), slot)

    def drain(turn: int, number: int) -> None:
        if rank != dst:
            return
        start = number * slot
        if number == 0 and targets[rank] != pointer:
            memmove(targets[rank], pointer, nbytes)
        for peer, size in enumerate(expected):
            if peer != rank and size > start:
                source = board.address[turn][peer]
                memmove(targets[peer] + start, source, min(slot, size - start))

    def direct(buffer: SharedBuffer, offsets: list[int]) -> None:
        for peer, size in enumerate(expected):
            if peer != rank or targets[rank] != pointer:
                memmove(targets[peer], buffer.address(peer, offsets[peer]), size)

    run_rounds(
        board,
        code_of("gather", x.dtype, root=dst),
        nbytes,
        place=board.buffers.place(pointer, nbytes),
        same_size=False,
        fill=fill,
        rounds=rounds,
        drain=drain,
        direct=direct,
    )


def scatter(board: Board, out: Tensor, ins: Sequence[Tensor] | None, src: int) -> None:
    """Fill `out` of rank `r` with `ins[r]` of `src`."""
    rank = board.rank
    pointer, nbytes = out.data_ptr(), out.numel() * out.element_size()
    sent = sizes_of(ins) if ins is not None else []
    sources = [block.data_ptr() for block in ins] if ins is not None else []
    share = _share(board)
    if rank == src:
        board.write_sizes(sent)

    def fill(address: int, number: int) -> None:
        if rank != src:
            return
        start = number * share
        for peer, size in enumerate(sent):
            if peer != rank and size > start:
                target = address + place_in_slot(rank, peer) * share
                memmove(target, sources[peer] + start, min(share, size - start))

    def rounds(turn: int) -> int:
        wanted = board.sizes(turn)
        offered = board.read_sizes(turn)[src][: board.size]
        if offered != wanted:
            raise board.mismatch(
                turn,
                f"rank {board.ranks[src]} scatters blocks of {offered} bytes, "
                f"but the ranks expect {wanted}",
            )
        return _rounds(max(n for q, n in enumerate(wanted) if q != src), share)

    def drain(turn: int, number: int) -> None:
        start = number * share
        if rank == src:
            if number == 0 and sources[rank] != pointer:
                memmove(pointer, sources[rank], nbytes)
        elif nbytes > start:
            source = board.address[turn][src] + place_in_slot(src, rank) * share
            memmove(pointer + start, source, min(share, nbytes - start))

    run_rounds(
        board,
        code_of("scatter", out.dtype, root=src),
        nbytes,
        same_size=False,
        fill=fill,
        rounds=rounds,
        drain=drain,
    )


def all_gather_ints(board: Board, values: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tuples of all ranks; they fit into a slot."""
    turn, nbytes = board.turn(), len(values) * 8
    if nbytes > board.slot_bytes:
        raise ValueError(f"{len(values)} ints do not fit into a slot of {board.slot_bytes} bytes")
    slots = board.views(turn, np.dtype(np.int64), nbytes)
    slots[board.rank][:] = values
    board.meet(turn, _INTS, nbytes)
    return [tuple(slot.tolist()) for slot in slots]


def share_texts(board: Board, text: str) -> list[str]:
    """Return the texts of all ranks; each is cut to what fits into a slot. Collective."""
    turn = board.turn()
    raw = np.frombuffer(text.encode()[: board.slot_bytes], np.uint8)
    board.raw[turn][board.rank][: len(raw)] = raw
    board.meet(turn, code_of("shared_buffer"), len(raw), same_size=False)
    return [
        bytes(slot[:size]).decode(errors="replace")
        for slot, size in zip(board.raw[turn], board.sizes(turn), strict=True)
    ]


def place_in_slot(owner: int, peer: int) -> int:
    """Return which share of the slot of `owner` is for `peer`; there is none for itself."""
    return peer if peer < owner else peer - 1


def _share(board: Board) -> int:
    """Return the bytes of a slot that each of the other ranks gets."""
    return board.slot_bytes // (board.size - 1) // _LINE * _LINE


def _rounds(nbytes: int, at_a_time: int) -> int:
    return max(1, -(-nbytes // at_a_time))

"""Collectives that reduce: all_reduce, reduce, reduce_scatter.

All ranks get the same bits. Where MPI's own order of additions could show in them, ranks exchange
their blocks and add them in rank order themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm.reductions import reduce_in_rank_order
from unisono.comm.transports.mpi import moves
from unisono.comm.transports.mpi.line import MAX_BYTES, Line
from unisono.comm.transports.mpi.moves import nbytes_of
from unisono.comm.transports.mpi.natives import choose_sum, native, wide_dtype

_SHARES_BYTES = 16 * 1024 * 1024
"""Larger tensors are reduced in stretches of this size, which bounds the memory for it."""


def all_reduce(line: Line, x: Tensor, op: str, dst: int | None = None) -> str:
    """Replace `x` on every rank, or on `dst` only, by the reduction; return how it was done."""
    name = choose_sum("all_reduce", x.dtype, op, nbytes_of(x), line.size)
    if x.numel() == 0:
        return name
    if name == "native":
        _native_all_reduce(line, x, op, dst)
    elif name == "all_to_all":
        _reduce_copies(line, x, op, dst)
    else:
        stretch = max(line.size, min(_SHARES_BYTES, line.chunk_bytes) // x.element_size())
        room = x.new_empty(min(stretch, x.numel()) + line.size)
        for part in x.view(-1).split(stretch):
            _reduce_shares(line, part, room, op, dst)
    return name


def _native_all_reduce(line: Line, x: Tensor, op: str, dst: int | None) -> None:
    wide = wide_dtype(x.dtype, op)
    kind, operation = native(line.mpi, wide, op)
    wanted = dst is None or dst == line.rank
    total = x if wide == x.dtype else x.to(wide)
    for begin, length in line.pieces(nbytes_of(total)):
        part = [line.memory(total, begin, length), length // total.element_size(), kind]
        if dst is None:
            line.start(line.comm.Iallreduce, line.mpi.IN_PLACE, part, operation)
        elif wanted:
            line.start(line.comm.Ireduce, line.mpi.IN_PLACE, part, operation, dst)
        else:
            line.start(line.comm.Ireduce, part, None, operation, dst)
    line.finish()
    if wanted:
        _conclude(x, total, op, line.size)


def _conclude(out: Tensor, total: Tensor, op: str, size: int) -> None:
    """Divide where a mean was asked for, and round once."""
    if op == "mean":
        total.div_(size)
    if total is not out:
        out.copy_(total.view_as(out))


def _reduce_copies(line: Line, x: Tensor, op: str, dst: int | None) -> None:
    """Fetch the tensors of all ranks and reduce them here."""
    flat = x.view(-1)
    if dst is not None and dst != line.rank:
        moves.gather(line, None, flat, dst)
        return
    copies = list(x.new_empty(line.size, flat.numel()).unbind())
    if dst is None:
        moves.all_gather(line, copies, flat)
    else:
        moves.gather(line, copies, flat, dst)
    reduce_in_rank_order(flat, copies, op)


def _reduce_shares(line: Line, x: Tensor, room: Tensor, op: str, dst: int | None) -> None:
    """Each rank reduces its share of `x`, and the shares are put together."""
    shares = list(x.tensor_split(line.size))
    length = shares[line.rank].numel()
    rows = list(room[: line.size * length].view(line.size, length).unbind())
    moves.all_to_all(line, rows, shares)
    result = rows[0]
    reduce_in_rank_order(result, rows, op)
    if dst is None:
        moves.all_gather(line, shares, result)
    else:
        moves.gather(line, shares if dst == line.rank else None, result, dst)


def reduce_scatter(line: Line, out: Tensor, ins: Sequence[Tensor], op: str) -> str:
    """Fill `out` of rank `r` with the reduction over ranks of `ins[r]`; return how."""
    nbytes = sum(map(nbytes_of, ins))
    name = choose_sum("reduce_scatter", out.dtype, op, nbytes, line.size)
    factor = wide_dtype(out.dtype, op).itemsize // out.element_size()
    if nbytes * factor > min(MAX_BYTES, line.chunk_bytes):
        name = "all_to_all"  # MPI could not count it
    if name == "native":
        _native_reduce_scatter(line, out, ins, op)
        return name
    rows = list(out.new_empty(line.size, out.numel()).unbind())
    moves.all_to_all(line, rows, [block.view(-1) for block in ins])
    reduce_in_rank_order(out.view(-1), rows, op)
    return name


def _native_reduce_scatter(line: Line, out: Tensor, ins: Sequence[Tensor], op: str) -> None:
    wide = wide_dtype(out.dtype, op)
    kind, operation = native(line.mpi, wide, op)
    counts = [block.numel() for block in ins]
    if wide == out.dtype and moves.is_one_stretch(ins):
        whole = next((block for block in ins if block.numel()), ins[0])
    else:
        whole = torch.cat([block.reshape(-1) for block in ins]).to(wide)
    total = torch.empty(out.numel(), dtype=wide)
    sent: list[Any] = [line.memory(whole, 0, sum(counts) * wide.itemsize), sum(counts), kind]
    received: list[Any] = [line.memory(total), total.numel(), kind]
    line.start(line.comm.Ireduce_scatter, sent, received, counts, operation)
    line.finish()
    _conclude(out, total, op, line.size)

"""Collectives of a group over its channel: moves, and reductions that give all ranks the same bits.

What only moves travels as bytes, so every dtype does, from where it lies.

MPI promises no order of additions. Where its order could show in the bits of a sum, ranks exchange
their blocks and add them in rank order themselves; elsewhere its own reductions serve.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm.arguments import bytes_of
from unisono.comm.engines.algorithms import MAX_PAIRWISE_RANKS, forced_algorithms
from unisono.comm.engines.mpi.channel import MAX_BYTES, Channel
from unisono.comm.reductions import accumulation_dtype, reduce_in_rank_order

COPIES_BYTES = 256 * 1024
"""Up to this many bytes over all ranks, every rank fetches all blocks and reduces them itself."""
SMALL_BYTES = 4 * 1024
"""Blocks up to this size are fetched whole by any number of ranks."""
_SHARES_BYTES = 16 * 1024 * 1024
"""Larger tensors are reduced in stretches of this size, which bounds the memory for it."""

_TYPES: dict[torch.dtype, str] = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_OPS: dict[str, str] = {
    "sum": "SUM",
    "sum64": "SUM",
    "mean": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}
_BOOL_OPS: dict[str, str] = {
    "sum": "LOR",
    "max": "LOR",
    "or": "LOR",
    "product": "LAND",
    "min": "LAND",
    "and": "LAND",
    "xor": "LXOR",
}


def is_one_stretch(blocks: Sequence[Tensor]) -> bool:
    """Whether the blocks lie behind each other in memory, short enough to be counted by MPI."""
    present = [block for block in blocks if block.numel()]
    ends = [block.data_ptr() + block.nbytes for block in present]
    follows = all(end == block.data_ptr() for end, block in zip(ends, present[1:], strict=False))
    return follows and sum(block.nbytes for block in present) <= MAX_BYTES


def broadcast(channel: Channel, x: Tensor, src: int) -> None:
    """Replace `x` on every rank by `x` of `src`."""
    for begin, length in channel.pieces(x.nbytes):
        channel.start(
            channel.comm.Ibcast, [channel.memory(x, begin, length), channel.mpi.BYTE], src
        )
    channel.finish()


def all_gather(channel: Channel, outs: Sequence[Tensor], x: Tensor) -> None:
    """Fill `outs[q]` with `x` of rank `q`.

    MPI passes blocks on among many ranks, for which it wants them behind each other in memory.
    """
    sizes = [out.nbytes for out in outs]
    if not is_one_stretch(outs):
        if channel.size <= MAX_PAIRWISE_RANKS or sum(sizes) > MAX_BYTES:
            all_to_all(channel, outs, [x] * channel.size)
            return
        joined = torch.empty(sum(sizes), dtype=torch.uint8)
        all_gather(channel, joined.split(sizes), x)
        for out, block in zip(outs, joined.split(sizes), strict=True):
            bytes_of(out).copy_(block)
        return
    if x.numel() and x.data_ptr() == outs[channel.rank].data_ptr():
        x = x.clone()  # MPI wants all ranks, or none, to work in place
    first = next((out for out in outs if out.numel()), outs[0])
    places = list(itertools.accumulate(sizes[:-1], initial=0))
    channel.hold(outs)
    received = [channel.memory(first, 0, sum(sizes)), (sizes, places), channel.mpi.BYTE]
    channel.start(channel.comm.Iallgatherv, [channel.memory(x), channel.mpi.BYTE], received)
    channel.finish()


def all_to_all(channel: Channel, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
    """Fill `outs[q]` with `ins[r]` of rank `q`; blocks may lie anywhere and have any size."""
    own, own_out = ins[channel.rank], outs[channel.rank]
    if own_out.numel() and own_out.data_ptr() != own.data_ptr():
        bytes_of(own_out).copy_(bytes_of(own))
    sent, received = _addressed(channel, ins), _addressed(channel, outs)
    channel.start(channel.comm.Ialltoallw, sent, received)
    for kind in (*sent[2], *received[2]):
        if kind != channel.mpi.BYTE:
            kind.Free()  # MPI keeps it until the transfer has ended
    channel.finish()


def _addressed(channel: Channel, blocks: Sequence[Tensor]) -> list[Any]:
    """Return blocks as MPI takes them from anywhere: datatypes that hold addresses and lengths.

    The own block is left out.
    """
    mpi, counts, kinds = channel.mpi, [0] * channel.size, [channel.mpi.BYTE] * channel.size
    for peer, block in enumerate(blocks):
        pieces = list(channel.pieces(block.nbytes))
        if pieces and peer != channel.rank:
            lengths = [length for _, length in pieces]
            begins = [block.data_ptr() + begin for begin, _ in pieces]
            counts[peer], kinds[peer] = 1, mpi.BYTE.Create_hindexed(lengths, begins).Commit()
    channel.hold(blocks)
    return [mpi.BOTTOM, (counts, [0] * channel.size), kinds]


def gather(channel: Channel, outs: Sequence[Tensor] | None, x: Tensor, dst: int) -> None:
    """Fill `outs[q]` of `dst` with `x` of rank `q`."""
    nothing = [x.new_empty(0)] * channel.size
    all_to_all(channel, nothing if outs is None else outs, _at(dst, x, nothing))


def scatter(channel: Channel, out: Tensor, ins: Sequence[Tensor] | None, src: int) -> None:
    """Fill `out` of rank `r` with `ins[r]` of `src`."""
    nothing = [out.new_empty(0)] * channel.size
    all_to_all(channel, _at(src, out, nothing), nothing if ins is None else ins)


def _at(place: int, x: Tensor, others: list[Tensor]) -> list[Tensor]:
    return [*others[:place], x, *others[place + 1 :]]


def barrier(channel: Channel) -> None:
    """Return when every rank has come."""
    channel.start(channel.comm.Ibarrier)
    channel.finish()


def all_gather_ints(channel: Channel, values: Sequence[int], rows: list[tuple[int, ...]]) -> None:
    """Append the tuples of all ranks to `rows`, in rank order."""
    mine = np.array(values, dtype=np.int64)
    everybody = np.empty((channel.size, len(mine)), dtype=np.int64)
    kind = channel.mpi.INT64_T
    channel.start(channel.comm.Iallgather, [mine, kind], [everybody, kind])
    channel.finish()
    rows.extend(tuple(row) for row in everybody.tolist())


def wide_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which MPI carries the reduction: 16-bit floats go as float32."""
    if dtype in (torch.float16, torch.bfloat16) and op != "sum64":
        return torch.float32
    return accumulation_dtype(dtype, op)


def native(mpi: Any, dtype: torch.dtype, op: str) -> tuple[Any, Any]:
    """Return MPI's datatype and operation for a reduction of `dtype`."""
    ops = _BOOL_OPS if dtype == torch.bool else _OPS
    return getattr(mpi, _TYPES[dtype]), getattr(mpi, ops[op])


def is_exact(dtype: torch.dtype, op: str, size: int) -> bool:
    """Whether any order of the ranks gives the same bits.

    Integers always; sums and products of two floats. Not the smaller or larger of two floats,
    one of which may be NaN, nor products of complex numbers.

    >>> is_exact(torch.int32, "sum", 4), is_exact(torch.float32, "sum", 4)
    (True, False)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    if size > 2 or dtype.itemsize < 4 or op == "sum64":
        return False
    return op in ("sum", "mean") or (op == "product" and not dtype.is_complex)


def choose_sum(verb: str, dtype: torch.dtype, op: str, nbytes: int, size: int) -> str:
    """Return how to reduce `nbytes` on each rank: `native`, `all_to_all` or `scatter_gather`.

    Args:
        verb: `all_reduce` (also for a reduction to one rank) or `reduce_scatter`.
        dtype: of the tensor.
        op: the reduction.
        nbytes: bytes of the whole tensor of one rank.
        size: ranks of the group.

    Returns:
        `native`: MPI's own call. `all_to_all`: ranks exchange blocks and reduce them in rank
        order. `scatter_gather`: the same by shares, which are then gathered.

    >>> choose_sum("all_reduce", torch.float32, "sum", 100, 4)
    'all_to_all'
    """
    forced = forced_algorithms().get(verb)
    if forced is not None:
        return forced
    if is_exact(dtype, op, size):
        return "native"
    if verb == "reduce_scatter" or nbytes <= SMALL_BYTES or nbytes * size <= COPIES_BYTES:
        return "all_to_all"
    return "scatter_gather"


def all_reduce(channel: Channel, x: Tensor, op: str, dst: int | None = None) -> str:
    """Replace `x` on every rank, or on `dst` only, by the reduction; return how it was done."""
    name = choose_sum("all_reduce", x.dtype, op, x.nbytes, channel.size)
    if x.numel() == 0:
        return name
    if name == "native":
        _native_all_reduce(channel, x, op, dst)
    elif name == "all_to_all":
        _reduce_copies(channel, x, op, dst)
    else:
        stretch = max(channel.size, min(_SHARES_BYTES, channel.chunk_bytes) // x.element_size())
        room = x.new_empty(min(stretch, x.numel()) + channel.size)
        for part in x.view(-1).split(stretch):
            _reduce_shares(channel, part, room, op, dst)
    return name


def _native_all_reduce(channel: Channel, x: Tensor, op: str, dst: int | None) -> None:
    wide = wide_dtype(x.dtype, op)
    kind, operation = native(channel.mpi, wide, op)
    wanted = dst is None or dst == channel.rank
    total = x if wide == x.dtype else x.to(wide)
    for begin, length in channel.pieces(total.nbytes):
        part = [channel.memory(total, begin, length), length // total.element_size(), kind]
        if dst is None:
            channel.start(channel.comm.Iallreduce, channel.mpi.IN_PLACE, part, operation)
        elif wanted:
            channel.start(channel.comm.Ireduce, channel.mpi.IN_PLACE, part, operation, dst)
        else:
            channel.start(channel.comm.Ireduce, part, None, operation, dst)
    channel.finish()
    if wanted:
        _conclude(x, total, op, channel.size)


def _conclude(out: Tensor, total: Tensor, op: str, size: int) -> None:
    """Divide where a mean was asked for, and round once."""
    if op == "mean":
        total.div_(size)
    if total is not out:
        out.copy_(total.view_as(out))


def _reduce_copies(channel: Channel, x: Tensor, op: str, dst: int | None) -> None:
    """Fetch the tensors of all ranks and reduce them here."""
    flat = x.view(-1)
    if dst is not None and dst != channel.rank:
        gather(channel, None, flat, dst)
        return
    copies = list(x.new_empty(channel.size, flat.numel()).unbind())
    if dst is None:
        all_gather(channel, copies, flat)
    else:
        gather(channel, copies, flat, dst)
    reduce_in_rank_order(flat, copies, op)


def _reduce_shares(channel: Channel, x: Tensor, room: Tensor, op: str, dst: int | None) -> None:
    """Each rank reduces its share of `x`, and the shares are put together."""
    shares = list(x.tensor_split(channel.size))
    length = shares[channel.rank].numel()
    rows = list(room[: channel.size * length].view(channel.size, length).unbind())
    all_to_all(channel, rows, shares)
    result = rows[0]
    reduce_in_rank_order(result, rows, op)
    if dst is None:
        all_gather(channel, shares, result)
    else:
        gather(channel, shares if dst == channel.rank else None, result, dst)


def reduce_scatter(channel: Channel, out: Tensor, ins: Sequence[Tensor], op: str) -> str:
    """Fill `out` of rank `r` with the reduction over ranks of `ins[r]`; return how."""
    nbytes = sum(block.nbytes for block in ins)
    name = choose_sum("reduce_scatter", out.dtype, op, nbytes, channel.size)
    factor = wide_dtype(out.dtype, op).itemsize // out.element_size()
    if nbytes * factor > min(MAX_BYTES, channel.chunk_bytes):
        name = "all_to_all"  # MPI could not count it
    if name == "native":
        _native_reduce_scatter(channel, out, ins, op)
        return name
    rows = list(out.new_empty(channel.size, out.numel()).unbind())
    all_to_all(channel, rows, [block.view(-1) for block in ins])
    reduce_in_rank_order(out.view(-1), rows, op)
    return name


def _native_reduce_scatter(channel: Channel, out: Tensor, ins: Sequence[Tensor], op: str) -> None:
    wide = wide_dtype(out.dtype, op)
    kind, operation = native(channel.mpi, wide, op)
    counts = [block.numel() for block in ins]
    if wide == out.dtype and is_one_stretch(ins):
        whole = next((block for block in ins if block.numel()), ins[0])
    else:
        whole = torch.cat([block.reshape(-1) for block in ins]).to(wide)
    total = torch.empty(out.numel(), dtype=wide)
    sent: list[Any] = [channel.memory(whole, 0, sum(counts) * wide.itemsize), sum(counts), kind]
    received: list[Any] = [channel.memory(total), total.numel(), kind]
    channel.start(channel.comm.Ireduce_scatter, sent, received, counts, operation)
    channel.finish()
    _conclude(out, total, op, channel.size)

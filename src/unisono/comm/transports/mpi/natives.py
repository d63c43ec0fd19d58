"""Which reductions MPI does itself, and which are done in rank order by us.

MPI promises no order of additions, so sums of floats over three and more ranks are not its. Pure
tables and one choice; the objects of mpi4py are looked up by their names.
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.comm.algorithms import forced_algorithms
from unisono.comm.reductions import accumulation_dtype

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

COPIES_BYTES = 256 * 1024
"""Up to this many bytes over all ranks, every rank fetches all blocks and reduces them itself."""
SMALL_BYTES = 4 * 1024
"""Blocks up to this size are fetched whole by any number of ranks."""


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
    one of which may be no number, nor products of complex numbers.

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

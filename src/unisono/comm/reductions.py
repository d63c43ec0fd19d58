"""Dtypes that travel, the reductions defined for them, and the dtype in which these are done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.errors import UnisonoError

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
"""Dtypes that travel, by the number under which they do; the core has the same. Append only."""

DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

PLAIN_DTYPES: frozenset[torch.dtype] = frozenset(DTYPES[:10])
"""Dtypes that every engine reduces; none of them can be a lazy conjugate."""

BOOL_OPS = {"sum": "or", "max": "or", "product": "and", "min": "and"}
"""What a reduction of truth values is."""

_FLOAT = ("sum", "mean", "product", "min", "max", "sum64")
_INTEGER = ("sum", "product", "min", "max", "and", "or", "xor")
_COMPLEX = ("sum", "mean", "product")

_OTHER_NAMES = {"avg": "mean", "average": "mean", "prod": "product", "add": "sum", "amax": "max",
                "amin": "min", "band": "and", "bor": "or", "bxor": "xor"}  # fmt: skip

_STANDS_FOR: dict[torch.dtype, torch.dtype] = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
}
"""Dtypes that torch cannot add on a CPU, and the dtype that does it for them."""

_STRETCH_BYTES = 16 * 1024 * 1024
"""Larger tensors are reduced in stretches of this size, which bounds the memory for it."""

_SIGN_BIT = torch.iinfo(torch.int64).min


def defined_ops(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions that are defined for `dtype`; none for 8-bit floats."""
    if dtype.is_complex:
        return _COMPLEX
    if dtype.is_floating_point:
        return _FLOAT if dtype.itemsize > 1 else ()
    return _INTEGER


@functools.cache
def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise `UnisonoError` unless `op` is a reduction defined for `dtype`."""
    legal = defined_ops(dtype)
    if op in legal:
        return
    name = str(dtype).removeprefix("torch.")
    dtypes = sorted({*_FLOAT, *_INTEGER, *_COMPLEX})
    if op not in dtypes:
        word = str(getattr(op, "name", op)).lower()  # torch's, too
        raise UnisonoError.because(
            f"reduction {op!r}",
            f"known are {', '.join(dtypes)}",
            None,
            f"op={word if word in dtypes else _OTHER_NAMES.get(word, 'sum')!r}",
        )
    if not legal:
        raise UnisonoError.because(
            f"reduction {op!r} of {name}",
            f"{name} can be moved but not added: its values are too coarse to hold a sum",
            None,
            "reduce x.to(torch.float32) and convert the result",
        )
    raise UnisonoError.because(
        f"reduction {op!r} of {name}",
        f"defined for {name}: {', '.join(legal)}",
        None,
        "x.to(torch.float64) before a mean of integers"
        if op == "mean"
        else f"op={legal[0]!r}, or another dtype",
    )


def encode(x: Tensor, op: str) -> Tensor:
    """Return a tensor of a dtype every engine can reduce; `x` itself where nothing is to do."""
    stand_in = _STANDS_FOR.get(x.dtype)
    if stand_in is None:
        return x
    if x.dtype != torch.uint64:
        return x.to(stand_in)
    bits = x.view(torch.int64)
    # Order of unsigned numbers is order of signed ones after flipping the top bit.
    return bits ^ _SIGN_BIT if op in ("min", "max") else bits.clone()


def decode(y: Tensor, op: str, dtype: torch.dtype) -> Tensor:
    """Undo `encode`."""
    if dtype not in _STANDS_FOR:
        return y
    if dtype != torch.uint64:
        return y.to(dtype)
    return (y ^ _SIGN_BIT if op in ("min", "max") else y).view(torch.uint64)


def accumulation_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which a sum of `dtype` is carried: 16-bit floats in float32."""
    if op == "sum64" and dtype.is_floating_point:
        return torch.float64
    if op in ("sum", "mean", "product") and dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


def combine_(accumulator: Tensor, x: Tensor, op: str) -> Tensor:
    """Reduce `x` into `accumulator`, in place. `bool` counts: sum is or, product is and."""
    if accumulator.dtype == torch.bool:
        op = BOOL_OPS.get(op, op)
    if op in ("sum", "sum64", "mean"):  # the rank that has added all divides
        return accumulator.add_(x)
    if op == "product":
        return accumulator.mul_(x)
    if op == "min":
        return torch.minimum(accumulator, x.to(accumulator.dtype), out=accumulator)
    if op == "max":
        return torch.maximum(accumulator, x.to(accumulator.dtype), out=accumulator)
    if op == "and":
        return accumulator.bitwise_and_(x)
    if op == "or":
        return accumulator.bitwise_or_(x)
    return accumulator.bitwise_xor_(x)


def reduce_in_rank_order(out: Tensor, blocks: list[Tensor], op: str) -> None:
    """Fill `out` with the reduction of `blocks`, first to last, rounded once at the end."""
    if out.dtype in _STANDS_FOR:
        total = encode(blocks[0], op).clone()
        reduce_in_rank_order(total, [encode(block, op) for block in blocks], op)
        out.copy_(decode(total, op, out.dtype))
        return
    add = "sum" if op == "mean" else op
    wide = accumulation_dtype(out.dtype, add)
    if wide == out.dtype:
        out.copy_(blocks[0])
        accumulator = out
    else:
        accumulator = blocks[0].to(wide)
    for block in blocks[1:]:
        combine_(accumulator, block, add)
    if op == "mean":
        accumulator.div_(len(blocks))
    if accumulator is not out:
        out.copy_(decode(accumulator, op, out.dtype))


def reduce_among(
    x: Tensor,
    op: str,
    swap: Callable[[Sequence[Tensor], Sequence[Tensor]], object],
    place: int,
    count: int,
    *,
    is_whole: bool,
) -> None:
    """Replace the flat `x` by its reduction over `count` ranks, in their order.

    Args:
        x: a tensor of one size on all of them.
        op: the reduction.
        swap: fills each of some blocks with what that rank has for this one; blocks.
        place: own place among the ranks.
        count: number of ranks.
        is_whole: every rank fetches all tensors; else each reduces a share, which is then gathered.
    """
    if is_whole:
        copies = list(x.new_empty((count, x.numel())).unbind())
        swap(copies, [x] * count)
        reduce_in_rank_order(x, copies, op)
        return
    for stretch in x.split(max(count, _STRETCH_BYTES // x.element_size())):
        shares = list(stretch.tensor_split(count))
        rows = list(x.new_empty((count, shares[place].numel())).unbind())
        swap(rows, shares)
        reduce_in_rank_order(rows[0], rows, op)
        swap(shares, [rows[0]] * count)

"""What a user hands to a verb: checked once, and laid out as engines take it.

Every refusal is a four-part error. Tensors travel as dense rows, their shapes as a few integers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES
from unisono.errors import MeshError, PartitionError, UnisonoError, an
from unisono.expect import is_integer, number_in
from unisono.torch_private import (
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_zero_tensor,
)

_MOVABLE = frozenset(DTYPES)


def check_tensor(x: object, device: torch.device, verb: str) -> Tensor:
    """Return `x` if it is a dense tensor on the communicator's kind of device."""
    if (
        isinstance(x, Tensor)
        and (x.device == device or x.device.type == device.type)
        and x.layout is torch.strided
        and x.dtype in _MOVABLE
        and not is_batchedtensor(x)
    ):
        return x
    raise _wrong_tensor(x, device, verb)


def _wrong_tensor(x: object, device: torch.device, verb: str) -> UnisonoError:
    if not isinstance(x, Tensor):
        request, problem = f"{verb} of {type(x).__name__}", "a tensor is needed"
        hint = f"{verb}(torch.tensor(x))"
    elif x.device.type == "meta":
        return _without_data(f"{verb} of a tensor on meta")
    elif x.device.type != device.type:
        request, problem = (
            f"{verb} of a tensor on {x.device}",
            f"the communicator works on {device}",
        )
        hint = f"x.to({str(device)!r}), or comm.with_device({str(x.device)!r})"
    elif x.layout is not torch.strided or x.is_quantized:
        kind = "a quantised" if x.is_quantized else f"a sparse ({x.layout})"
        request, problem = f"{verb} of {kind} tensor", "only dense tensors travel"
        hint = "x.dequantize()" if x.is_quantized else "x.to_dense()"
    elif is_batchedtensor(x):
        return vmapped(verb, verb)
    else:
        request, problem = f"{verb} of a tensor of {x.dtype}", "torch has no kernels for this dtype"
        hint = f"{verb}(x.view(torch.uint8)), and .view({x.dtype}) of the result"
    return UnisonoError.because(request, problem, None, hint)


def check_not_vmapped(x: Tensor, verb: str) -> None:
    """Refuse a tensor of `torch.func.vmap`."""
    if is_batchedtensor(x):
        raise vmapped(verb, verb)


def vmapped(movement: str, called: str) -> UnisonoError:
    """Return the error of a movement of data under `torch.func.vmap`.

    Args:
        movement: what was mapped over.
        called: what to call once instead.
    """
    return UnisonoError.because(
        f"torch.func.vmap over {movement}",
        "a collective cannot be vmapped: ranks would not agree on the number of calls",
        None,
        f"give the tensor a batch dim and call {called} once",
    )


def refuse_transformed(x: Tensor, verb: str) -> None:
    """Refuse a tensor of `torch.func.grad`, `vjp` or `jvp`: verbs have no derivative."""
    if is_functorch_wrapped_tensor(x):
        raise UnisonoError.because(
            f"{verb} of a tensor that torch.func differentiates",
            "the verbs of a communicator have no derivative",
            None,
            "the operator that has one, from unisono.operators: all_sum_reduce(x, comm=comm), ...",
        )


def check_device(device: torch.device) -> None:
    """Refuse a communicator for tensors without data."""
    if device.type == "meta":
        raise _without_data("a communicator for tensors on meta")


def _without_data(request: str) -> UnisonoError:
    hint = "torch.zeros_like(x, device='cpu'); for a module: module.to_empty(device='cpu')"
    return UnisonoError.because(request, "they have no data to move", None, hint)


def check_target(x: object, device: torch.device, verb: str) -> Tensor:
    """Return `x` if it is a tensor as `check_tensor` wants it, whose elements can be written."""
    target = check_tensor(x, device, verb)
    if not target.is_contiguous() or is_zero_tensor(target):
        check_writable(target, verb)
    return target


def check_writable(x: Tensor, verb: str) -> None:
    """Refuse to write to zeros without memory, and to one place several times (`expand`)."""
    repeated = [d for d in range(x.dim()) if x.shape[d] > 1 and x.stride(d) == 0]
    if is_zero_tensor(x):
        request = f"{verb} of a tensor of shape {list(x.shape)} that has no memory"
        problem = "torch stands for its zeros without storing them, so nothing can be written"
    elif repeated and x.numel():
        request = f"{verb} of an expanded tensor of shape {list(x.shape)}"
        problem = (
            f"strides {list(x.stride())}: along dim {repeated[0]} all {x.shape[repeated[0]]} "
            "elements are one place in memory, which cannot hold different results"
        )
    else:
        return
    other = f", or {verb[:-1]}(x), which returns a new tensor" if verb.endswith("_") else " first"
    raise UnisonoError.because(request, problem, None, f"x = x.clone(){other}")


def _outside(value: object, least: int, below: int, *, problem: str) -> tuple[str, str]:
    """Return problem and arithmetic of a value that is not an int in `[least, below)`."""
    if not is_integer(value):
        problem = f"{an(type(value).__name__)}, not an int; {problem}"
    return problem, f"{least} <= {value!r} < {below} does not hold"


def check_rank(rank: int, size: int, what: str, verb: str) -> int:
    """Return `rank` if it is a rank of a group of `size`."""
    if is_integer(rank) and 0 <= rank < size:
        return operator.index(rank)
    raise MeshError.because(
        f"{verb}({what}={rank!r})",
        *_outside(rank, 0, size, problem=f"the group has {size} rank{'s' if size > 1 else ''}"),
        f"{what}=0, a rank of the group, which may be another one in the world",
    )


def check_dim(dim: int, x: Tensor, verb: str) -> int:
    """Return `dim` counted from the front; a tensor without dims counts as one row."""
    dims = max(x.dim(), 1)
    if is_integer(dim) and -dims <= dim < dims:
        return operator.index(dim) % dims
    raise PartitionError.because(
        f"{verb}(dim={dim!r}) of shape {list(x.shape)}",
        *_outside(dim, -dims, dims, problem=f"{x.dim()} dims"),
        f"dim={dims - 1} is the last one",
    )


def check_tag(tag: int, verb: str) -> int:
    """Return `tag` if it is one that every backend can give a message."""
    if is_integer(tag) and 0 <= tag < 2**31:
        return operator.index(tag)
    problem = "a tag is an integer, the same at both ends"
    raise UnisonoError.because(
        f"{verb}(tag={tag!r})", *_outside(tag, 0, 2**31, problem=problem), "tag=1"
    )


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """Return integers (numpy's and those of a tensor too) as a tuple, None for others."""
    if not isinstance(values, Iterable):
        return None
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        return None


def check_sizes(
    sizes: Sequence[int], size: int, verb: str, *, total: int | None = None, what: str = "sizes"
) -> tuple[int, ...]:
    """Return `sizes` as a tuple of one entry per rank, none negative, adding up to `total`."""
    values, arithmetic = whole_numbers(sizes), None
    if values is None:
        problem = "not a list of integers"
    elif len(values) != size:
        problem, arithmetic = f"{len(values)} entries for {size} ranks", f"{len(values)} != {size}"
    elif min(values) < 0:
        problem = f"a negative size: {min(values)}"
    elif total is None or sum(values) == total:
        return values
    else:
        problem = f"{total} rows in the tensor"
        arithmetic = f"{' + '.join(map(str, values))} = {sum(values)} != {total}"
    raise PartitionError.because(
        f"{verb}({what}={list(values) if values else sizes!r})",
        problem,
        arithmetic,
        f"{what}=[...] with the rows of each of {size} ranks, 0 for one without a block",
    )


def check_ranks(ranks: object, size: int, request: str) -> tuple[int, ...]:
    """Return `ranks` as a tuple of ranks of a group of `size`: at least one, none twice."""
    listed = list(ranks) if isinstance(ranks, Iterable) else ranks
    chosen = whole_numbers(listed) or ()
    bad = [r for r in chosen if not 0 <= r < size]
    twice = sorted({r for r in chosen if chosen.count(r) > 1})
    if bad or twice or not chosen:
        raise MeshError.because(
            f"{request}({listed!r})",
            f"a communicator of {size} ranks",
            f"out of range: {bad}"
            if bad
            else f"more than once: {twice}"
            if twice
            else "empty, or not a list of ranks",
            f"[0, 1]: ranks of this communicator are 0 to {size - 1}, each at most once",
        )
    return chosen


def check_timeout(timeout_s: float) -> float:
    """Return a deadline in seconds if it is positive and finite."""
    if not isinstance(timeout_s, Real) or not 0 < timeout_s < math.inf:
        raise UnisonoError.because(
            f"timeout_s={timeout_s!r}",
            "a deadline must be positive and finite, in seconds",
            None,
            "timeout_s=30.0",
        )
    return float(timeout_s)


def environment_timeout_s() -> float | None:
    """Return the deadline that `UNISONO_TIMEOUT_S` sets, None where it sets none."""
    return number_in("UNISONO_TIMEOUT_S", at_least=0.001)


# -- tensors as they travel: bytes, rows, and what ranks tell of their own -------------------------

_MAX_DIMS = 12


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view."""
    flat = x.reshape(-1)
    if flat.dtype == torch.uint8:
        return flat
    # One element, or none, may have any stride and still count as contiguous.
    count = flat.numel()
    return (flat.as_strided((count,), (1,)) if count < 2 else flat).view(torch.uint8)


def is_dense(x: Tensor) -> bool:
    """Whether the values of `x` lie in memory, in order: none lazily negated, none left out."""
    return x.is_contiguous() and not (x.is_conj() or x.is_neg() or is_zero_tensor(x))


def dense(x: Tensor) -> Tensor:
    """Return `x` with its values laid out in order; `x` itself where they are."""
    if is_dense(x):
        return x
    return stored(x).contiguous()


def stored(x: Tensor) -> Tensor:
    """Return `x` with its values in memory: lazily negated ones, and zeros that have none."""
    if is_zero_tensor(x):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_conj().resolve_neg()


def rows_first(x: Tensor, dim: int) -> Tensor:
    """Return `x` detached and contiguous with `dim` in front; a 0-dim tensor is one row."""
    rows = x.detach()
    if rows.dim() == 0:
        rows = rows.reshape(1)
    elif dim:
        rows = rows.movedim(dim, 0)
    return dense(rows)


def rows_back(x: Tensor, dim: int) -> Tensor:
    """Undo `rows_first` on a result."""
    return x if dim == 0 else x.movedim(0, dim).contiguous()


def split_evenly(rows: int, parts: int) -> tuple[int, ...]:
    """Return balanced block lengths: the first `rows % parts` blocks have one more."""
    share, rest = divmod(rows, parts)
    return tuple(share + (part < rest) for part in range(parts))


def pack_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return shape and dtype as a fixed number of ints, first the length of dim 0."""
    if len(shape) > _MAX_DIMS:
        raise PartitionError.because(
            f"a tensor of {len(shape)} dims", f"at most {_MAX_DIMS} dims travel with their sizes"
        )
    padded = [*shape, *([-1] * (_MAX_DIMS - len(shape)))]
    return (padded[0], DTYPE_NUMBERS[dtype], *padded[1:])


def unpack_shape(record: Sequence[int]) -> tuple[tuple[int, ...], torch.dtype]:
    """Undo `pack_shape`."""
    shape = tuple(n for n in (record[0], *record[2:]) if n >= 0)
    return shape, DTYPES[record[1]]


def do_not_fit(verb: str, ranks: Sequence[int], records: Sequence[tuple[int, ...]]) -> Exception:
    """Return the error for blocks that cannot be joined, from what each rank has told of its own.

    Args:
        verb: what was to join them.
        ranks: world ranks of the group.
        records: of each, `pack_shape` and the dim.
    """
    lines: list[str] = []
    for rank, record in zip(ranks, records, strict=True):
        shape, dtype = unpack_shape(record[:-1])
        name = str(dtype).removeprefix("torch.")
        lines.append(f"rank {rank}: {name} rows of {list(shape[1:])}, joined along {record[-1]}")
    return PartitionError.because(
        f"{verb} of blocks that do not fit together",
        "\n".join(lines),
        None,
        "blocks may differ only along the joined dim",
    )

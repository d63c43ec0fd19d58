"""Rules for sums, means, extremes and softmax: blocks first, then one sum over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.expect import is_integer
from unisono.nn.planned import as_autocast, sum_dtype, wide
from unisono.nn.split_tensors.blocks import pointwise
from unisono.nn.split_tensors.tensor import (
    Cut,
    NeedsWhole,
    NoRule,
    Run,
    Split,
    call,
    like,
    own_copy,
    rule,
)
from unisono.operators import sum_to_replicated


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or (not is_integer(dim) and len(dim) == 0):
        return list(range(x.ndim))
    return sorted({d % x.ndim for d in ([dim] if is_integer(dim) else dim)})


def _check_numbers(dtype: torch.dtype) -> None:
    """Leave to torch what it refuses: statistics of integers."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise NoRule("integers")


def _left(x: Split, dims: Sequence[int], keepdim: bool) -> dict[int, Cut]:
    """Return the cuts of what is left when dims are reduced."""
    return {
        dim if keepdim else dim - sum(d < dim for d in dims): cut
        for dim, cut in x.cuts.items()
        if dim not in dims
    }


def added(local: Tensor, cuts: Sequence[Cut], run: Run) -> Tensor:
    """Return the sum of what ranks hold along these cuts, which they then use alike."""
    comm = run.ranks_of(cuts)
    return local if comm is None else sum_to_replicated(local, comm=comm)


def reduced(
    x: Tensor,
    how: str,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the sum or mean of a tensor over dims."""
    dims = _dims(x, dim)
    if not isinstance(x, Split):
        return (torch.mean if how == "mean" else torch.sum)(x, dims, keepdim, dtype=dtype)
    function = torch.mean if how == "mean" else torch.sum
    local = as_autocast(x.local, function) if dtype is None else x.local.to(dtype)
    total = local.sum(dims, keepdim, dtype=sum_dtype(local))
    total = added(total, [cut for d, cut in x.cuts.items() if d in dims], x.run)
    if how == "mean":
        total = total / math.prod(x.shape[d] for d in dims)
    if dtype is not None or x.dtype.is_floating_point:
        total = total.to(local.dtype)
    return like(x, total, _left(x, dims, keepdim))


@rule("sum", "mean")
def _sum(
    func: Callable[..., Any],
    input: Split,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if func.__name__ == "mean":
        _check_numbers(dtype or input.dtype)
    return reduced(input, func.__name__, dim, keepdim, dtype)


def _root(squares: Tensor) -> Tensor:
    """Return the root. Its derivative at 0 is 0, as torch's of norms and deviations; not inf."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


@rule("var", "std")
def _var(
    func: Callable[..., Any],
    input: Split,
    dim: int | Sequence[int] | bool | None = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    _check_numbers(input.dtype)
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    taken = correction if correction is not None else 0 if unbiased is False else 1
    dims = _dims(input, dim)
    inside = [cut for d, cut in input.cuts.items() if d in dims]
    count, local = math.prod(input.shape[d] for d in dims), wide(input.local)
    mean = own_copy(added(local.sum(dims, True), inside, input.run) / count, inside, input.run)
    squares = added((local - mean).abs().square().sum(dims, keepdim), inside, input.run)
    result = squares / max(0.0, count - taken)
    result = _root(result) if func.__name__ == "std" else result
    result = result.to(input.dtype) if input.dtype.is_floating_point else result
    return like(input, result, _left(input, dims, keepdim))


@rule("max", "min", "amax", "amin", "argmax", "argmin", "prod", "any", "all", "logsumexp", "median",
      "topk", "sort", "argsort", "cumsum", "cumprod")  # fmt: skip
def _along_whole_dims(func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Apply what looks along one whole dim to blocks; two arguments are compared point by point."""
    name = func.__name__
    if args and isinstance(args[0], Tensor) and name in ("max", "min"):
        return pointwise(func, input, *args, **kwargs)
    if not isinstance(input, Split) or (args and isinstance(args[0], Tensor)):
        raise NoRule("arguments of an unusual form")
    at = 1 if name == "topk" else 0
    dim = kwargs.get("dim", args[at] if len(args) > at else None)
    if dim is None and name in ("topk", "sort", "argsort"):
        dim = -1
    if dim is None:
        raise NoRule("over all points")
    dims = _dims(input, dim)
    for d in dims:
        if d in input.cuts:
            raise NeedsWhole(d, "along the cut")
    result = func(input.local, *args, **kwargs)
    keeps = name in ("topk", "sort", "argsort", "cumsum", "cumprod") or bool(
        kwargs.get("keepdim", args[at + 1] if len(args) > at + 1 else False)
    )
    cuts = _left(input, dims, keeps)
    if isinstance(result, Tensor):
        return like(input, result, cuts)
    return type(result)([like(input, part, cuts) for part in result])


@rule("linalg_vector_norm")
def _vector_norm(
    func: Callable[..., Any],
    x: Split,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dims = _dims(x, dim)
    if not any(d in x.cuts for d in dims):
        return like(x, func(x.local, ord, dims, keepdim, dtype=dtype), _left(x, dims, keepdim))
    if ord != 2 or x.is_complex():
        raise NoRule("a norm along the cut that is not Euclidean")
    local = as_autocast(x.local, func) if dtype is None else x.local.to(dtype)
    _check_numbers(local.dtype)
    inside = [cut for d, cut in x.cuts.items() if d in dims]
    total = added(wide(local).square().sum(dims, keepdim), inside, x.run)
    return like(x, _root(total).to(local.dtype), _left(x, dims, keepdim))


@rule("norm")
def _norm(
    func: Callable[..., Any],
    input: Split,
    p: float | str | None = "fro",
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if out is not None or (isinstance(p, str) and p != "fro"):
        raise NoRule(f"p={p!r}, out={out!r}")
    order = 2.0 if p is None or isinstance(p, str) else p
    return _vector_norm(torch.linalg.vector_norm, input, order, dim, keepdim, dtype=dtype)


@rule("normalize")
def _normalize(
    func: Callable[..., Any],
    input: Split,
    p: float = 2.0,
    dim: int | Sequence[int] = 1,
    eps: float = 1e-12,
    out: Tensor | None = None,
) -> Tensor:
    if out is not None:
        raise NoRule("out=")
    norm = _vector_norm(torch.linalg.vector_norm, input, p, dim, True)
    return pointwise(torch.div, input, call(torch.clamp_min, norm, eps))


@rule("softmax", "log_softmax", "softmin")
def _softmax(
    func: Callable[..., Any],
    input: Split,
    dim: int | None = None,
    _stacklevel: int | torch.dtype | None = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    name = func.__name__
    if isinstance(_stacklevel, torch.dtype):  # only the functions of F have this one
        dtype = _stacklevel
    if dim is None or name == "softmin":
        raise NoRule("without a dim")
    input.local.size(dim)  # raises beyond its dims, which softmax without data does not
    dim %= input.ndim
    softmax = getattr(torch, name)
    local = as_autocast(input.local, softmax, 0) if dtype is None else input.local.to(dtype)
    cut = input.cuts.get(dim)
    if cut is None:
        return like(input, softmax(local, dim))
    _check_numbers(local.dtype)
    # The largest value only keeps exp in range; it has no part in the derivative.
    with torch.no_grad():
        top = cut.comm.all_reduce(local.detach().amax(dim, keepdim=True), "max")
    shifted = wide(local) - top
    total = own_copy(added(shifted.exp().sum(dim, True), [cut], input.run), [cut], input.run)
    result = shifted.exp() / total if name == "softmax" else shifted - total.log()
    return like(input, result.to(local.dtype))


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
      "adaptive_max_pool2d", "adaptive_max_pool3d")  # fmt: skip
def _adaptive_pool(
    func: Callable[..., Any], input: Split, output_size: Any, return_indices: bool = False
) -> Tensor:
    name = func.__name__
    count = int(name[-2])
    sizes = (output_size,) * count if is_integer(output_size) else tuple(output_size)
    first = input.ndim - count
    over = [first + i for i in range(count)]
    cut_dims = [d for d in over if d in input.cuts]
    if cut_dims and "avg" in name and all(n == 1 for n in sizes):
        return reduced(input, "mean", over, True)
    for d in cut_dims:
        raise NeedsWhole(d, "windows of unlike sizes along the cut")
    if return_indices:
        raise NoRule("indices")
    return like(input, func(input.local, output_size))

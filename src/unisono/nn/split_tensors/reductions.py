"""Rules for sums, means, extremes and softmax: blocks first, then one sum over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.expect import is_integer
from unisono.nn.precision import as_autocast, sum_dtype, wide
from unisono.nn.split_tensors.blocks import fitted, layout_of, own_copy
from unisono.nn.split_tensors.dispatch import call
from unisono.nn.split_tensors.rules import rule
from unisono.nn.split_tensors.tensor import Cut, NoRule, Run, Split, like, without_runs
from unisono.operators import all_gather, concat_replicated, sum_to_replicated


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
    total = added(total, _cuts_of(x, dims), x.run)
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


def _root(powers: Tensor, order: float = 2) -> Tensor:
    """Return the root. Its derivative at 0 is 0, as torch's of norms and deviations; not inf."""
    is_zero = powers == 0
    powers = powers.masked_fill(is_zero, 1.0)
    root = powers.sqrt() if order == 2 else powers.pow(1 / order)
    return root.masked_fill(is_zero, 0.0)


def _cuts_of(x: Split, dims: Sequence[int]) -> list[Cut]:
    """Return the cuts among reduced dims."""
    return [cut for d, cut in x.cuts.items() if d in dims]


def _check_along(x: Split, dims: Sequence[int]) -> None:
    """Leave what is not reduced along a cut to the operator on blocks."""
    if not _cuts_of(x, dims):
        raise NoRule("not along the cut")


@rule("var", "std", "var_mean", "std_mean")
def _var(
    func: Callable[..., Any],
    input: Split,
    dim: int | Sequence[int] | bool | None = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Any:
    _check_numbers(input.dtype)
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    less = correction if correction is not None else 0 if unbiased is False else 1
    dims, name = _dims(input, dim), func.__name__
    inside = _cuts_of(input, dims)
    count, local = math.prod(input.shape[d] for d in dims), wide(input.local)
    mean = own_copy(added(local.sum(dims, True), inside, input.run) / count, inside, input.run)
    squares = added((local - mean).abs().square().sum(dims, keepdim), inside, input.run)
    result = squares / max(0.0, count - less)
    result = _root(result) if name.startswith("std") else result
    result = result.to(input.dtype) if input.dtype.is_floating_point else result
    spread = like(input, result, _left(input, dims, keepdim))
    return (spread, reduced(input, "mean", dims, keepdim)) if name.endswith("mean") else spread


# -- along the cut: the blocks first, then what is left of each rank ------------------------------


def _one_per_rank(x: Tensor, dim: int, cut: Cut) -> Tensor:
    """Return what all ranks have in a dim of one point, one after the other. Differentiable."""
    return concat_replicated(x, dim, [1] * cut.comm.size, comm=cut.comm)


@rule("prod", "logsumexp", "any", "all")
def _twice(
    func: Callable[..., Any],
    input: Split,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Reduce the blocks, then what ranks have come to."""
    dims, kind = _dims(input, dim), {} if dtype is None else {"dtype": dtype}
    _check_along(input, dims)
    x = input.local
    for d in dims:
        x = func(x, d, True, **kind)
        if d in input.cuts:
            x = func(_one_per_rank(x, d, input.cuts[d]), d, True, **kind)
    x = x if keepdim else _squeezed(x, dims)
    return like(input, x, _left(input, dims, keepdim))


def _squeezed(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in reversed(dims):
        x = x.squeeze(d)
    return x


class _Slope(torch.autograd.Function):
    """Zeros whose derivative is that of the argument."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient."""
        return grad


@rule("amax", "amin")
def _extreme(
    func: Callable[..., Any],
    input: Split,
    dim: int | Sequence[int] | None = (),
    keepdim: bool = False,
) -> Tensor:
    """Return the extreme; all points of all ranks that have it share its gradient."""
    dims = _dims(input, dim)
    _check_along(input, dims)
    inside, local = _cuts_of(input, dims), input.local
    with torch.no_grad():
        top = func(local.detach(), dims, True)
        for d, cut in input.cuts.items():
            if d in dims:
                top = func(_one_per_rank(top, d, cut), d, True)
    result = top
    if local.requires_grad:
        is_top = local == top
        slopes = (_Slope.apply(local) * is_top).sum(dims, True)
        count = added(is_top.sum(dims, True), inside, input.run)
        result = top + added(slopes, inside, input.run) / count
    return like(input, result if keepdim else _squeezed(result, dims), _left(input, dims, keepdim))


@rule("max", "min", "argmax", "argmin")
def _place_of_extreme(
    func: Callable[..., Any],
    input: Split,
    dim: int | Tensor | None = None,
    keepdim: bool = False,
) -> Any:
    """Return the extreme along a cut dim, and where it is: the first one of equal ones."""
    name = func.__name__
    if isinstance(dim, Tensor):
        raise NoRule("a comparison point by point")
    if dim is None and name in ("max", "min"):
        return _extreme(getattr(torch, f"a{name}"), input)
    if dim is None:
        return _flat_place(func, input, keepdim)
    dim %= input.ndim
    if dim not in input.cuts:
        raise NoRule("not along the cut")
    cut = without_runs(input, dim)
    choose = getattr(torch, name.removeprefix("arg"))
    values, places = choose(input.local, dim, True)
    values = _one_per_rank(values, dim, cut)
    places = _one_per_rank(places + cut.bounds[cut.comm.rank], dim, cut)
    rank = choose(values.detach(), dim, True)[1]
    cuts = _left(input, [dim], keepdim)
    pair = [x.gather(dim, rank) for x in (values, places)]
    pair = [like(input, x if keepdim else x.squeeze(dim), cuts) for x in pair]
    return pair[1] if name.startswith("arg") else tuple(pair)


def _flat_place(func: Callable[..., Any], x: Split, keepdim: bool) -> Tensor:
    """Return where the extreme is in the flat tensor: the first of equal ones, in one meeting."""
    local = x.local.detach()
    at = func(local)
    index = list(torch.unravel_index(at, local.shape))
    for dim, cut in x.cuts.items():
        before = index[dim] // cut.own * sum(cut.sizes) + cut.bounds[cut.comm.rank]
        index[dim] = before + index[dim] % cut.own
    place = torch.zeros_like(at)
    for i, n in zip(index, x.shape, strict=True):
        place = place * n + i
    comm = x.run.ranks_of(x.cuts.values())
    values, places = (
        concat_replicated(t.reshape(1), 0, [1] * comm.size, comm=comm) if comm else t.reshape(1)
        for t in (local.flatten()[at], place)
    )
    best = values[func(values)]
    is_best = (values == best) | ((values != values) & (best != best))
    first = places.masked_fill(~is_best, x.numel()).min()
    return first.view([1] * x.ndim) if keepdim else first


# -- counts -------------------------------------------------------------------------


@rule("allclose")
def _all_close(func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    return bool(call(torch.all, call(torch.isclose, *args, **kwargs)))


def _ends(x: Split) -> tuple[Tensor, Tensor]:
    return _extreme(torch.amin, x), _extreme(torch.amax, x)


@rule("histc")
def _histogram(
    func: Callable[..., Any], input: Split, bins: int = 100, min: float = 0, max: float = 0
) -> Tensor:
    low, high = min, max
    if low == high:
        low, high = map(float, _ends(input))
        if low == high:
            low, high = low - 1, high + 1
    if not math.isfinite(high - low):
        raise NoRule("bins without bounds")
    return added(func(input.local, bins, low, high), list(input.cuts.values()), input.run)


@rule("bincount")
def _counts(
    func: Callable[..., Any], input: Split, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    low, high = map(int, _ends(input))
    if min(low, minlength) < 0:
        raise NoRule("negative numbers")
    weights_of_block = None if weights is None else fitted(weights, layout_of([input]), input.run)
    counts = func(input.local, weights_of_block, max(minlength, high + 1))
    return added(counts, list(input.cuts.values()), input.run)


@rule("searchsorted", "bucketize")
def _placed_among(func: Callable[..., Any], first: Any, second: Any, **options: Any) -> Tensor:
    """Add up how many points of each block of a sorted sequence are smaller."""
    is_bucketize = func.__name__ == "bucketize"
    values, sequence = (first, second) if is_bucketize else (second, first)
    if not isinstance(sequence, Split) or isinstance(values, Split):
        raise NoRule("not along the cut")
    ((dim, cut),) = sequence.cuts.items()
    if dim != sequence.ndim - 1 or cut.outer != 1 or options.get("sorter") is not None:
        raise NoRule("not along the cut")
    call_ = (values, sequence.local) if is_bucketize else (sequence.local, values)
    return added(func(*call_, **options), [cut], sequence.run)


@rule("cumsum", "cumprod")
def _scan(
    func: Callable[..., Any], input: Split, dim: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Scan the own block, then add, or multiply by, what all earlier ranks have come to."""
    dim %= max(input.ndim, 1)
    if dim not in input.cuts:
        raise NoRule("not along the cut")
    cut, is_sum = without_runs(input, dim), func.__name__ == "cumsum"
    local = func(input.local, dim, dtype=dtype)
    ends = local.narrow(dim, local.shape[dim] - 1, 1)
    ends = all_gather(ends, dim, [1] * cut.comm.size, comm=cut.comm)
    shape = [cut.comm.size if d == dim else 1 for d in range(local.ndim)]
    is_later = (torch.arange(cut.comm.size, device=ends.device) >= cut.comm.rank).view(shape)
    # Ranks compute alike, the first one too, so that they meet alike in any derivative.
    before = ends.masked_fill(is_later, 0 if is_sum else 1)
    before = (torch.sum if is_sum else torch.prod)(before, dim, keepdim=True, dtype=local.dtype)
    return like(input, local + before if is_sum else local * before)


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
    if not (inside := _cuts_of(x, dims)):
        return like(x, func(x.local, ord, dims, keepdim, dtype=dtype), _left(x, dims, keepdim))
    local = as_autocast(x.local, func) if dtype is None else x.local.to(dtype)
    _check_numbers(local.dtype)
    if math.isinf(ord):
        how = torch.amax if ord > 0 else torch.amin
        return _extreme(how, Split(local.abs(), x.cuts, x.run), dims, keepdim)
    if ord not in (0, 1) and (ord < 2 or local.is_complex()):
        raise NoRule("a norm whose second derivative is not that of the norms of blocks")
    values = wide(local)
    if ord == 2:
        powers = values.square()
    else:
        powers = (values != 0).to(values.abs().dtype) if ord == 0 else values.abs().pow(ord)
    total = added(powers.sum(dims, keepdim), inside, x.run)
    total = total if ord < 2 else _root(total, ord)
    return like(x, total.to(local.abs().dtype), _left(x, dims, keepdim))


@rule("softmax", "log_softmax")
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
    if dim is None:
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

"""Arithmetic of one dim of a convolution, pooling or transposed convolution.

A window is the run of padded input positions that a share of the outputs reads. It is described by
segments, each saying where its points come from. A transposed convolution spreads input `i` over
outputs `[s * i - p, s * i - p + d * (k - 1) + 1)`. No torch and no process here.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, Literal, NamedTuple

from unisono.errors import PartitionError
from unisono.expect import is_integer
from unisono.topology.decompose import Interval

Kind = Literal["copy", "flip", "repeat", "fill", "wrap"]
"""How the points of a segment are made: as they are, reversed, one point many times, a constant; or
as they are, but from the other end of the tensor."""

PADDING_MODES: tuple[str, ...] = ("zeros", "reflect", "replicate", "circular")
"""What may stand outside the tensor."""
PAD_MODES = {
    "constant": "zeros",
    "reflect": "reflect",
    "replicate": "replicate",
    "circular": "circular",
}
"""torch's modes of padding -> ours."""


class Segment(NamedTuple):
    """A run of a window in one dim and the global points it is made of."""

    dest: Interval
    """Where in the window."""
    source: Interval
    """Which global points; one for a repeat; for a fill, the positions outside the tensor."""
    kind: Kind
    """How they are written."""


def span(k: int, d: int = 1) -> int:
    """Return the number of positions from the first to the last tap of a kernel."""
    return d * (k - 1) + 1


def output_length(
    x: int, k: int, s: int = 1, p: int | tuple[int, int] = 0, d: int = 1, ceil_mode: bool = False
) -> int:
    """Return the output length of a convolution or pooling of `x` points.

    Args:
        x: input length.
        k: kernel size.
        s: stride.
        p: padding of both sides, or `(left, right)`.
        d: dilation.
        ceil_mode: count a last window that hangs over the right end, if it starts inside.

    >>> output_length(10, 3, 2), output_length(10, 3, 2, ceil_mode=True)
    (4, 5)
    """
    left, right = (p, p) if is_integer(p) else p
    return check_window(x, k, s, left, right, d, ceil_mode=ceil_mode)


def window(
    y0: int,
    y1: int,
    x: int,
    k: int,
    s: int = 1,
    pl: int = 0,
    pr: int = 0,
    d: int = 1,
    mode: str = "zeros",
) -> tuple[Segment, ...]:
    """Return the segments of the window that outputs `[y0, y1)` read, in ascending order.

    Together their `dest` ranges are `[0, s * (y1 - 1 - y0) + d * (k - 1) + 1)`; no outputs, no
    segments. Positions more than `pr` beyond the right end (`ceil_mode`) are always fill.

    >>> [tuple(segment) for segment in window(0, 5, 10, 3, pl=1, pr=1)]
    [((0, 1), (-1, 0), 'fill'), ((1, 7), (0, 6), 'copy')]
    """
    if y0 >= y1:
        return ()
    low = s * y0 - pl
    high = s * (y1 - 1) - pl + span(k, d)
    segments: list[Segment] = []
    if low < 0:
        stop = min(high, 0)
        segments.append(Segment((0, stop - low), *_outside(low, stop, x, mode)))
    if max(low, 0) < min(high, x):
        inside = (max(low, 0), min(high, x))
        segments.append(Segment((inside[0] - low, inside[1] - low), inside, "copy"))
    if high > x:
        start, stop = max(low, x), min(high, x + pr)
        if start < stop:
            segments.append(Segment((start - low, stop - low), *_outside(start, stop, x, mode)))
        start = max(low, stop)
        if start < high:
            segments.append(Segment((start - low, high - low), (start, high), "fill"))
    return tuple(segments)


def check_window(
    x: int,
    k: int,
    s: int,
    pl: int,
    pr: int,
    d: int,
    mode: str = "zeros",
    *,
    ceil_mode: bool = False,
    dim: int | None = None,
) -> int:
    """Return the output length of one dim of a window operation; raise if it cannot be done."""
    where = "" if dim is None else f" in dim {dim}"
    call = f"kernel {k}, stride {s}, padding ({pl}, {pr}), dilation {d} on {x} points{where}"
    if mode not in PADDING_MODES:
        raise PartitionError.because(
            f"padding mode {mode!r}", hint=f"one of {', '.join(map(repr, PADDING_MODES))}"
        )
    least = {"kernel": (k, 1), "stride": (s, 1), "dilation": (d, 1), "padding": (min(pl, pr), 0)}
    for name, (value, limit) in least.items():
        if value < limit:
            raise PartitionError.because(
                call, arithmetic=f"{name}: {value} < {limit}", hint=f"use {name} {limit} or more"
            )
    reach = span(k, d)
    length = _length(x, reach, s, pl, pr, ceil_mode)
    if length < 1 and reach > 1:
        both, numbers = ("2p", f"{2 * pl}") if pl == pr else ("pl + pr", f"{pl} + {pr}")
        raise PartitionError.because(
            call,
            arithmetic=f"X + {both} < K: {x} + {numbers} < {reach}",
            hint=f"a kernel of at most {(x + pl + pr - 1) // d + 1}, or more padding"
            if x + pl + pr > 0
            else "more padding",
        )
    most, refused = max(pl, pr), None
    if mode == "reflect" and most and most >= x:
        refused = f"p >= X: {most} >= {x}", f"reflect padding below {x}"
    if mode == "circular" and most > x:
        refused = f"p > X: {most} > {x}", f"circular padding of at most {x}"
    if mode == "replicate" and most and x == 0:
        refused = f"no point to repeat: X = {x}", 'padding_mode="zeros"'
    if refused is not None:
        raise PartitionError.because(call, None, *refused)
    return length


def check_pool(k: int, p: int, d: int = 1, *, dim: int | None = None) -> None:
    """Raise unless the padding is at most half of the kernel, as torch asks of pooling."""
    reach = span(k, d)
    if p > reach // 2:
        where = "" if dim is None else f" in dim {dim}"
        raise PartitionError.because(
            f"pooling with kernel {k}, padding {p}, dilation {d}{where}",
            arithmetic=f"p > K // 2: {p} > {reach} // 2 = {reach // 2}",
            hint=f"padding of at most {reach // 2}",
        )


def pool_counts(
    y0: int, y1: int, x: int, k: int, s: int = 1, p: int = 0, count_include_pad: bool = True
) -> tuple[int, ...]:
    """Return, for each output of `[y0, y1)`, the number of points its average is taken over.

    Positions of the padding count when `count_include_pad`; those beyond it (`ceil_mode`) never do.

    >>> pool_counts(0, 3, 5, 3, 2, 1), pool_counts(0, 3, 5, 3, 2, 1, count_include_pad=False)
    ((3, 3, 3), (2, 3, 2))
    """
    counts: list[int] = []
    for i in range(y0, y1):
        start = s * i - p
        stop = min(start + k, x + p)
        if not count_include_pad:
            start, stop = max(start, 0), min(stop, x)
        counts.append(stop - start)
    return tuple(counts)


def transposed_length(
    x: int, k: int, s: int = 1, p: int = 0, d: int = 1, output_padding: int = 0
) -> int:
    """Return the output length of a transposed convolution of `x` points.

    >>> transposed_length(5, 3, 2, 1, output_padding=1)
    10
    """
    call = f"kernel {k}, stride {s}, padding {p}, dilation {d}, output padding {output_padding}"
    if min(k, s, d) < 1 or min(p, output_padding, x) < 0:
        raise PartitionError.because(
            f"{call} on {x} points",
            arithmetic="kernel, stride, dilation >= 1; padding, output padding, points >= 0",
            hint="check the sign of each number",
        )
    if output_padding and output_padding >= max(s, d):
        raise PartitionError.because(
            call,
            arithmetic=f"output padding >= max(stride, dilation): {output_padding} >= {max(s, d)}",
            hint=f"output_padding of at most {max(s, d) - 1}",
        )
    if x == 0:
        return 0
    length = (x - 1) * s - 2 * p + span(k, d) + output_padding
    if length < 1:
        raise PartitionError.because(
            f"{call} on {x} points",
            arithmetic=f"(X-1)s - 2p + K + o = "
            f"{(x - 1) * s} - {2 * p} + {span(k, d)} + {output_padding} = {length} < 1",
            hint="less padding",
        )
    return length


def transposed_needed(
    y0: int, y1: int, x: int, k: int, s: int = 1, p: int = 0, d: int = 1
) -> Interval:
    """Return the inputs that reach outputs `[y0, y1)`; empty intervals start where they stop.

    >>> transposed_needed(5, 10, 5, 3, 2, 1)
    (2, 5)
    """
    if y0 >= y1:
        return 0, 0
    start = max(0, -(-(y0 + p - d * (k - 1)) // s))
    stop = min(x, (y1 - 1 + p) // s + 1)
    return (start, stop) if start < stop else (start, start)


def copied(start: int, stop: int) -> tuple[Segment, ...]:
    """Return the window that is the points `[start, stop)` as they are."""
    return (Segment((0, stop - start), (start, stop), "copy"),) if start < stop else ()


def transposed_window(
    y0: int, y1: int, x: int, k: int, s: int = 1, p: int = 0, d: int = 1
) -> tuple[Segment, ...]:
    """Return the window of outputs `[y0, y1)` as segments for `halo.plan_windows`: copies only."""
    return copied(*transposed_needed(y0, y1, x, k, s, p, d))


def transposed_cover(needed: Interval, k: int, s: int = 1, p: int = 0, d: int = 1) -> Interval:
    """Return the outputs that a local transposed convolution (padding 0) of `needed` writes.

    May reach beyond the share, where it must be cut, or stop short of it, where the output is zero.
    """
    start, stop = needed
    first = s * start - p
    return (first, s * (stop - 1) - p + span(k, d)) if start < stop else (first, first)


def as_int(value: Any) -> int | None:
    """Return an int for any kind of integer (numpy's, a tensor of one); None for anything else."""
    try:
        return index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor with several values says the last two
        return None


def per_dim(value: int | Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """Return one int per dim: one int, alone or in a sequence, counts for all `count` dims.

    Anything that is an integer will do, from a list or an array.

    >>> per_dim([2], 3, "stride")
    (2, 2, 2)
    """
    values = _each_dim(value, count, name, f"one int, or {count} of them")
    sizes = [as_int(one) for one in values]
    if None in sizes:
        raise PartitionError.because(
            f"{name}={value!r}", "not integers", None, f"one int, or {count} of them"
        )
    return tuple(size for size in sizes if size is not None)


def padding_pairs(
    padding: int | str | Sequence[int | tuple[int, int]],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Return `(left, right)` for each dim of a kernel.

    Args:
        padding: one int, one int or `(left, right)` a dim, `"valid"` or `"same"`.
        kernel_size: one int per dim; likewise `stride` and `dilation`.

    >>> padding_pairs("same", (4,), (1,), (1,))
    ((1, 2),)
    """
    count = len(kernel_size)
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * count
        if padding != "same":
            raise PartitionError.because(
                f"padding {padding!r}", hint='"same", "valid", an int, or one int per dim'
            )
        if any(s != 1 for s in stride):
            raise PartitionError.because(
                f'padding "same" with stride {list(stride)}',
                arithmetic=f"{max(stride)} != 1",
                hint="stride 1, or padding as numbers",
            )
        totals = [span(k, d) - 1 for k, d in zip(kernel_size, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    kinds = f"one int, or {count} ints or (left, right) pairs"
    return tuple(
        _both_sides(one, padding, kinds) for one in _each_dim(padding, count, "padding", kinds)
    )


def _each_dim(value: Any, count: int, name: str, expected: str) -> tuple[Any, ...]:
    """Return one entry per dim: the one there is, repeated, or as many as there are dims."""
    if as_int(value) is not None:
        return (value,) * count
    try:
        values = tuple(value)
    except TypeError:
        raise PartitionError.because(f"{name}={value!r}", "not a size", None, expected) from None
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise PartitionError.because(
            f"{name}={list(values)}",
            f"a kernel of {count} dims",
            f"{len(values)} != {count}",
            expected,
        )
    return values


def _both_sides(one: Any, padding: Any, expected: str) -> tuple[int, int]:
    size = as_int(one)
    if size is not None:
        return size, size
    try:
        left, right = (index(side) for side in one)
    except (TypeError, ValueError):
        raise PartitionError.because(
            f"padding={padding!r}", f"{one!r} is neither an int nor a pair", None, expected
        ) from None
    return left, right


def _length(x: int, reach: int, s: int, pl: int, pr: int, ceil_mode: bool) -> int:
    room = x + pl + pr - reach
    if not ceil_mode:
        return room // s + 1
    length = -(-room // s) + 1
    return length - 1 if (length - 1) * s >= x + pl else length


def _outside(start: int, stop: int, x: int, mode: str) -> tuple[Interval, Kind]:
    """Return what stands at positions `[start, stop)`, all left of 0 or all from `x` on."""
    if mode == "zeros":
        return (start, stop), "fill"
    if mode == "replicate":
        return ((0, 1) if start < 0 else (x - 1, x)), "repeat"
    if mode == "circular":
        shift = x if start < 0 else -x
        return (start + shift, stop + shift), "wrap"
    mirror = 0 if start < 0 else 2 * (x - 1)
    return (mirror - stop + 1, mirror - start + 1), "flip"

"""Balanced blocks, cuts and row-major numbering: integers in, integers out.

`cuts` of a dim of length `n` over `parts` ranks are `parts + 1` ascending positions from 0 to `n`;
the rank with index `i` holds `[cuts[i], cuts[i + 1])`. No torch and no process here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from unisono.errors import PartitionError

Interval = tuple[int, int]
"""Half-open range `[start, stop)`."""


def split_sizes(n: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of the balanced blocks; they differ by at most one, larger ones first.

    >>> split_sizes(10, 4), split_sizes(2, 3)
    ((3, 3, 2, 2), (1, 1, 0))
    """
    _check_split(n, parts)
    quotient, rest = divmod(n, parts)
    return (quotient + 1,) * rest + (quotient,) * (parts - rest)


def bounds(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the cuts of blocks of these sizes.

    >>> bounds((7, 3))
    (0, 7, 10)
    """
    negative = [size for size in sizes if size < 0]
    if negative:
        raise PartitionError.because(
            f"cuts of blocks of sizes {list(sizes)}",
            arithmetic=f"{negative[0]} < 0",
            hint="give sizes that are 0 or larger",
        )
    return tuple(accumulate(sizes, initial=0))


def split_cuts(n: int, parts: int) -> tuple[int, ...]:
    """Return the cuts of the balanced blocks: `bounds(split_sizes(n, parts))`."""
    return bounds(split_sizes(n, parts))


def block(n: int, parts: int, index: int) -> Interval:
    """Return the balanced block of `index` as `(start, stop)`.

    >>> block(10, 4, 1)
    (3, 6)
    """
    _check_split(n, parts)
    check_within(f"block {index} of {n} points over {parts} ranks", index, parts)
    quotient, rest = divmod(n, parts)
    start = quotient * index + min(index, rest)
    return start, start + quotient + (index < rest)


def block_at(cuts: Sequence[int], i: int) -> int:
    """Return the index of the (never empty) block of `cuts` that holds point `i`."""
    return bisect_right(cuts, i) - 1


def blocks_over(cuts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield each block that shares points with `[start, stop)`: its index, and their range.

    >>> list(blocks_over((0, 3, 3, 8), 2, 5))
    [(0, 2, 3), (2, 3, 5)]
    """
    first = block_at(cuts, start) if start < stop else len(cuts)
    for i in range(first, len(cuts) - 1):
        if cuts[i] >= stop:
            break
        low, high = max(start, cuts[i]), min(stop, cuts[i + 1])
        if low < high:
            yield i, low, high


def check_cuts(cuts: Sequence[Sequence[int]]) -> None:
    """Raise unless every dim has cuts that start at 0 and ascend."""
    for dim, bounds in enumerate(cuts):
        if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
            raise PartitionError.because(
                f"cuts {list(bounds)} in dim {dim}",
                arithmetic="need 0 = b_0 <= b_1 <= ... <= b_P with P >= 1",
                hint="decompose.bounds(sizes) makes cuts of block sizes",
            )


def flat_index(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the row-major number of `index` in a grid of `shape`.

    >>> flat_index((2, 3), (1, 0))
    3
    """
    flat = 0
    for size, i in zip(shape, index, strict=True):
        flat = flat * size + i
    return flat


def grid_index(shape: Sequence[int], flat: int) -> tuple[int, ...]:
    """Return the coordinates of number `flat` in a grid of `shape`; inverse of `flat_index`.

    >>> grid_index((2, 3), 3)
    (1, 0)
    """
    index: list[int] = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))


def fitting_shape(shape: Sequence[int], total: int) -> tuple[int, ...]:
    """Return the shape of product `total` that changes the fewest sizes of `shape`, those least.

    >>> fitting_shape((2, 3), 8)
    (2, 4)
    """

    def distance(candidate: tuple[int, ...]) -> tuple[int, float]:
        pairs = list(zip(candidate, shape, strict=True))
        changed = sum(new != old for new, old in pairs)
        return changed, sum(abs(math.log(new / max(old, 1))) for new, old in pairs)

    return min(factorisations(total, len(shape)), key=distance)


def check_within(call: str, i: int, n: int) -> None:
    """Raise unless `i` is one of the numbers from 0 to `n - 1`."""
    if not 0 <= i < n:
        hint = f"a number from 0 to {n - 1}" if n else "a dim of length 0 has no points"
        raise PartitionError.because(call, arithmetic=f"not 0 <= {i} < {n}", hint=hint)


def factorisations(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered way to write `total` as a product of `count` factors."""
    if count == 1:
        yield (total,)
        return
    for factor in range(1, total + 1):
        if total % factor == 0:
            for rest in factorisations(total // factor, count - 1):
                yield (factor, *rest)


def _check_split(n: int, parts: int) -> None:
    if n < 0 or parts < 1:
        raise PartitionError.because(
            f"{n} points over {parts} ranks",
            arithmetic=f"{n} < 0" if n < 0 else f"{parts} < 1",
            hint="give a length of 0 or more and at least 1 rank",
        )

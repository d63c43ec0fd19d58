"""Arithmetic of one dim of average pooling: by how many points each window is divided.

Windows and lengths are those of `window.py` (`ceil_mode` included). No torch and no process here.
"""

from __future__ import annotations

from unisono.errors import PartitionError

__all__ = ["check_pool", "pool_counts"]


def check_pool(k: int, p: int, d: int = 1, *, dim: int | None = None) -> None:
    """Raise unless the padding is at most half of the kernel, as torch asks of pooling."""
    reach = d * (k - 1) + 1
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

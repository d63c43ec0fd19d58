"""Pure arithmetic of transposed convolution and pooling counts, compared with torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.topology.simulation import cut_blocks, fill_windows

from unisono.errors import PartitionError
from unisono.topology import decompose, halo
from unisono.topology.window import (
    output_length,
    pool_counts,
    transposed_cover,
    transposed_length,
    transposed_needed,
    transposed_window,
)

shards = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 0)


@settings(max_examples=30, deadline=None)
@given(
    sizes=shards,
    k=st.integers(1, 5),
    s=st.integers(1, 4),
    p=st.integers(0, 3),
    d=st.integers(1, 3),
    o=st.integers(0, 3),
)
def test_transposed_conv_of_the_needed_points_is_that_of_the_tensor(
    sizes: list[int], k: int, s: int, p: int, d: int, o: int
) -> None:
    assume(o < max(s, d))
    cuts = decompose.bounds(sizes)
    x_length, parts = cuts[-1], len(sizes)
    assume((x_length - 1) * s - 2 * p + d * (k - 1) + o + 1 > 0)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 1, x_length, dtype=torch.float64, generator=generator)
    weight = torch.randn(1, 1, k, dtype=torch.float64, generator=generator)
    y = transposed_length(x_length, k, s, p, d, o)
    # torch refuses an output padding of neither stride nor dilation only after computing sizes
    expected = F.conv_transpose1d(x, weight, None, s, p, o, 1, d)
    assert y == expected.shape[-1]

    reads = partial(transposed_window, x=x_length, k=k, s=s, p=p, d=d)
    axis = halo.Axis(decompose.split_cuts(y, parts), reads)
    plans = [halo.plan_windows([cuts], (i,), [axis]) for i in range(parts)]
    windows = fill_windows(cut_blocks(x[0, 0], [cuts]), plans)
    outputs = []
    for i, local in enumerate(windows):
        y0, y1 = decompose.block(y, parts, i)
        needed = transposed_needed(y0, y1, x_length, k, s, p, d)
        out = torch.zeros(y1 - y0, dtype=torch.float64)
        if needed[0] < needed[1]:
            assert local.numel() == needed[1] - needed[0]
            spread = F.conv_transpose1d(local[None, None], weight, None, s, 0, 0, 1, d)[0, 0]
            start, stop = transposed_cover(needed, k, s, p, d)
            assert spread.numel() == stop - start
            low, high = max(start, y0), min(stop, y1)
            if low < high:
                out[low - y0 : high - y0] = spread[low - start : high - start]
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), expected[0, 0])


@settings(max_examples=30, deadline=None)
@given(
    x=st.integers(1, 20),
    k=st.integers(1, 5),
    s=st.integers(1, 5),
    p=st.integers(0, 2),
    ceil_mode=st.booleans(),
    include=st.booleans(),
    parts=st.integers(1, 4),
)
def test_average_pool_is_the_window_sum_over_the_count(
    x: int, k: int, s: int, p: int, ceil_mode: bool, include: bool, parts: int
) -> None:
    p = min(p, k // 2)
    assume(x + 2 * p >= k)
    values = torch.randn(1, 1, x, dtype=torch.float64, generator=torch.Generator().manual_seed(x))
    expected = F.avg_pool1d(values, k, s, p, ceil_mode, include)
    y = output_length(x, k, s, p, ceil_mode=ceil_mode)
    assert y == expected.shape[-1]
    cuts = decompose.split_cuts(x, parts)
    plans = [halo.plan([cuts], (i,), k, s, p, ceil_mode=ceil_mode) for i in range(parts)]
    windows = fill_windows(cut_blocks(values[0, 0], [cuts]), plans)
    averages = []
    for i, local in enumerate(windows):
        y0, y1 = decompose.block(y, parts, i)
        counts = pool_counts(y0, y1, x, k, s, p, include)
        sums = local.unfold(0, k, s).sum(-1) if y0 < y1 else local
        assert sums.numel() == len(counts) == y1 - y0
        averages.append(sums / torch.tensor(counts, dtype=torch.float64))
    torch.testing.assert_close(torch.cat(averages), expected[0, 0])


@pytest.mark.parametrize(
    ("x", "k", "s", "p", "floor", "ceil"),
    [
        (10, 3, 2, 0, 4, 5),
        (5, 2, 3, 0, 2, 2),
        (3, 2, 3, 1, 2, 2),
        (7, 3, 3, 1, 3, 3),
        (2, 3, 2, 0, 0, 1),
    ],
)
def test_ceil_mode_counts_a_last_window_that_starts_inside(
    x: int, k: int, s: int, p: int, floor: int, ceil: int
) -> None:
    assert output_length(x, k, s, p, ceil_mode=True) == ceil
    if floor:
        assert output_length(x, k, s, p) == floor
    else:
        with pytest.raises(PartitionError, match="2 \\+ 0 < 3"):
            output_length(x, k, s, p)

"""Pure arithmetic of upsampling, compared with torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.topology.simulation import cut_blocks, fill_windows

from unisono.topology import decompose, halo
from unisono.topology.resample import Resampling

shards = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 0)
RESAMPLE = [
    ("nearest", False), ("nearest-exact", False), ("linear", False), ("linear", True),
    ("cubic", False), ("cubic", True),
]  # fmt: skip


def torch_resample(x: torch.Tensor, mode: str, align: bool, **size: Any) -> torch.Tensor:
    """One-dim `F.interpolate`; cubic exists in torch for images only, so rows are made equal."""
    if mode != "cubic":
        extra = {"align_corners": align} if mode == "linear" else {}
        return F.interpolate(x[None, None], mode=mode, **size, **extra)[0, 0]
    image = x.expand(4, -1)[None, None]
    if "size" in size:
        size = {"size": (4, size["size"])}
    else:
        size = {"scale_factor": (1.0, size["scale_factor"])}
    return F.interpolate(image, mode="bicubic", align_corners=align, **size)[0, 0, 1]


@settings(max_examples=30, deadline=None)
@given(
    sizes=shards,
    y=st.integers(1, 40),
    scale=st.sampled_from([None, 0.5, 1.3, 1.5, 2.0, 2.6, 3.0]),
    parts_of=st.sampled_from(RESAMPLE),
)
def test_upsampling_by_taps_of_the_needed_points_is_torch_interpolate(
    sizes: list[int], y: int, scale: float | None, parts_of: tuple[str, bool]
) -> None:
    mode, align = parts_of
    cuts = decompose.bounds(sizes)
    x_length, parts = cuts[-1], len(sizes)
    if scale is not None:
        assume(math.floor(x_length * scale) >= 1)
        assume(not align)  # torch ignores the factor there, and so must a layer
        y = math.floor(x_length * scale)
        size: dict[str, Any] = {"scale_factor": scale}
    else:
        size = {"size": y}
    how = Resampling(x_length, y, mode, scale, align, double=True)
    x = torch.randn(x_length, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = torch_resample(x, mode, align, **size)
    assert expected.shape[-1] == y

    axis = halo.Axis(decompose.split_cuts(y, parts), how.window)
    shares = [decompose.block(y, parts, i) for i in range(parts)]
    plans = [halo.plan_windows([cuts], (i,), [axis]) for i in range(parts)]
    windows = fill_windows(cut_blocks(x, [cuts]), plans)
    outputs = []
    for (y0, y1), local in zip(shares, windows, strict=True):
        start, stop = how.needed(y0, y1)
        assert local.numel() == stop - start
        for j in range(y0, y1):
            taps = how.taps(j)
            assert math.isclose(sum(taps.weights), 1.0)
            assert all(start <= point < stop for point in taps.points)
            outputs.append(
                sum(w * local[t - start] for t, w in zip(taps.points, taps.weights, strict=True))
            )
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_rounds_as_torch_does(mode: str, dtype: torch.dtype) -> None:
    sizes: list[tuple[int, dict[str, Any]]] = [
        *((x, {"size": y}) for x, y in ((100, 299), (10, 1000), (7, 93), (49, 50))),
        *((x, {"scale_factor": s}) for x in (16, 30, 31, 253) for s in (2.3, 0.7, 1.15, 0.1)),
    ]
    for x, how in sizes:
        points = torch.arange(x, dtype=dtype)[None, None]
        expected = F.interpolate(points, mode=mode, **how)[0, 0].to(torch.int64).tolist()
        y, scale, double = len(expected), how.get("scale_factor"), dtype == torch.float64
        how = Resampling(x, y, mode, scale, double=double)
        found = [how.taps(j) for j in range(y)]
        assert [taps.points[0] for taps in found] == expected, (x, how)

"""Windows of random shards, kernels and padding modes, compared with torch on the whole tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.topology.simulation import (
    add_windows,
    cut_blocks,
    fill_windows,
    indices,
    join_blocks,
    slices,
)
from torch import Tensor

from unisono.topology import decompose, halo
from unisono.topology.window import PADDING_MODES

shards = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0)


@st.composite
def convolutions(draw: st.DrawFn, spatial: int) -> dict[str, Any]:
    """Draw shards and a kernel that fits them, in each of `spatial` dims."""
    mode = draw(st.sampled_from(PADDING_MODES))
    sizes: list[list[int]] = []
    kernel: list[int] = []
    stride: list[int] = []
    padding: list[tuple[int, int]] = []
    dilation: list[int] = []
    for _ in range(spatial):
        own = draw(shards if spatial == 1 else shards.filter(lambda s: len(s) <= 3))
        x = sum(own)
        most = {"zeros": 6, "replicate": 6, "circular": x, "reflect": x - 1}[mode]
        left, right = (draw(st.integers(0, min(most, 6))) for _ in range(2))
        k = draw(st.integers(1, 5))
        room = x + left + right - 1
        d = draw(st.integers(1, 3))
        if d * (k - 1) > room:
            d = 1
            k = min(k, room + 1)
        sizes.append(own)
        kernel.append(k)
        dilation.append(d)
        padding.append((left, right))
        stride.append(draw(st.integers(1, 4)))
    return {
        "sizes": sizes,
        "args": {
            "kernel_size": tuple(kernel),
            "stride": tuple(stride),
            "padding": tuple(padding),
            "dilation": tuple(dilation),
            "padding_mode": mode,
        },
    }


def pad_like_torch(x: Tensor, args: dict[str, Any]) -> Tensor:
    flat = [p for pair in reversed(args["padding"]) for p in pair]
    mode = "constant" if args["padding_mode"] == "zeros" else args["padding_mode"]
    return F.pad(x, flat, mode=mode) if any(flat) else x


def conv(x: Tensor, weight: Tensor, args: dict[str, Any]) -> Tensor:
    call = F.conv1d if weight.dim() == 3 else F.conv2d
    return call(x, weight, stride=args["stride"], dilation=args["dilation"])


def compare_with_torch(case: dict[str, Any], batch: list[int]) -> None:
    args = case["args"]
    cuts = [decompose.bounds(batch), (0, 2), *(decompose.bounds(s) for s in case["sizes"])]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn([c[-1] for c in cuts], generator=generator, dtype=torch.float64)
    weight = torch.randn([3, 2, *args["kernel_size"]], generator=generator, dtype=torch.float64)
    plans = [halo.plan(cuts, index, **args) for index in indices(cuts)]
    windows = fill_windows(cut_blocks(x, cuts), plans)
    outputs = []
    for plan, local in zip(plans, windows, strict=True):
        assert tuple(local.shape) == plan.window_shape
        shape = (plan.output_shape[0], 3, *plan.output_shape[2:])
        outputs.append(conv(local, weight, args) if math.prod(shape) else x.new_zeros(shape))
        assert tuple(outputs[-1].shape) == shape
    grid = [len(c) - 1 for c in cuts]
    expected = conv(pad_like_torch(x, args), weight, args)
    torch.testing.assert_close(join_blocks(outputs, grid), expected)

    # The adjoint: <F x, y> = <x, F* y>, with random window gradients.
    grads = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in windows]
    filled = fill_windows([torch.zeros_like(b) for b in cut_blocks(x, cuts)], plans)
    assert all(not w.any() for w in filled)
    back = add_windows(grads, plans)
    left = sum((w * g).sum() for w, g in zip(windows, grads, strict=True))
    right = sum((a * b).sum() for a, b in zip(cut_blocks(x, cuts), back, strict=True))
    torch.testing.assert_close(left, right)


@settings(max_examples=30, deadline=None)
@given(case=convolutions(1), batch=st.sampled_from([[2], [1, 1], [3, 0]]))
def test_conv1d_of_the_windows_is_conv1d_of_the_tensor(case, batch) -> None:
    compare_with_torch(case, batch)


@settings(max_examples=30, deadline=None)
@given(case=convolutions(2))
def test_conv2d_of_the_windows_is_conv2d_of_the_tensor(case) -> None:
    compare_with_torch(case, [1])


@settings(max_examples=30, deadline=None)
@given(case=convolutions(2))
def test_both_ends_of_a_message_list_the_same_pieces(case) -> None:
    cuts = [decompose.bounds(s) for s in case["sizes"]]
    plans = [halo.plan(cuts, index, **case["args"]) for index in indices(cuts)]
    sent = {(plan.rank, m.peer): m.pieces for plan in plans for m in plan.sends}
    received = {(m.peer, plan.rank): m.pieces for plan in plans for m in plan.recvs}
    assert sent == received
    for plan in plans:
        peers = [m.peer for m in plan.recvs]
        assert peers == sorted(peers), "one message per peer, ascending"
        assert len(set(peers)) == len(peers)
        covered = torch.zeros(plan.window_shape, dtype=torch.int64)
        for piece in [*plan.local, *(p for m in plan.recvs for p in m.pieces)]:
            covered[slices(piece.dest)] += 1
        assert covered.max() <= 1 if covered.numel() else True
        if not plan.has_fill and covered.numel():
            assert covered.min() == 1


@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("d", [1, 2])
def test_same_padding_is_what_torch_does(k: int, d: int) -> None:
    cuts = [(0, 1), (0, 1), (0, 6, 10, 13)]
    x = torch.randn(1, 1, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    weight = torch.arange(1.0, k + 1, dtype=torch.float64).reshape(1, 1, k)
    plans = [halo.plan(cuts, i, (k,), padding="same", dilation=d) for i in indices(cuts)]
    windows = fill_windows(cut_blocks(x, cuts), plans)
    joined = torch.cat([F.conv1d(w, weight, dilation=d) for w in windows], -1)
    padded = F.pad(x, [(d * (k - 1)) // 2, d * (k - 1) - (d * (k - 1)) // 2])
    torch.testing.assert_close(joined, F.conv1d(padded, weight, dilation=d))
    assert joined.shape[-1] == 13

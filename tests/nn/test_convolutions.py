"""Convolutions split in space, batch and channels, with drawn and chosen settings, against torch.

Values, gradients of inputs and parameters, and second derivatives; blocks of any cuts, empty ones
and such that are narrower than the halo too.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.drawing import RANKS, common, grid, quick, windows
from torch import nn

import unisono
import unisono.nn as unn
from unisono.comm import trace
from unisono.errors import PartitionError
from unisono.nn.layers.conv import (
    DistributedChannelConv2d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedFeatureConv1d,
    DistributedGeneralConv2d,
)
from unisono.topology import Partition
from unisono.topology.window import span


@pytest.mark.ranks(RANKS)
@quick
@given(
    case=windows(modes=("zeros", "reflect", "replicate", "circular")),
    groups=st.sampled_from([1, 1, 2]),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "replicated", "root"]),
    **common,
)
def test_convolutions_split_in_space_equal_torch(
    case, groups, bias, weights, choice, seed, batch, proof
):
    space = case.pop("space")
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    kind = getattr(unn, f"DistributedFeatureConv{dims}d")
    plain = getattr(nn, f"Conv{dims}d")
    options = {**case, "groups": groups, "bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(P, 2, 4, **options, weights=weights),
        lambda: plain(2, 4, **options),
    )
    x = proof.drawn(batch, 2, *space)
    proof.compare(ours, theirs, x, P, P, seed=seed)


@pytest.mark.ranks(4)
@quick
@given(
    case=windows(modes=("zeros", "circular"), dims=(1, 2)),
    split=st.sampled_from([(1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2), (2, 2, 1, 1), (1, 1, 4, 1),
                           (1, 4, 1, 1), (2, 1, 2, 1), (1, 1, 1, 4), (1, 1, 3, 1)]),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "root"]),
    seed=st.integers(0, 40),
    turned=st.booleans(),
)  # fmt: skip
def test_convolutions_split_in_channels_equal_torch(
    case, split, channels, bias, weights, seed, turned, proof
):
    space = case.pop("space")
    dims = len(space)
    batch, ins, outs, along = split
    rest = (along, *(1,) * (dims - 1))
    P_x, P_y = Partition([batch, ins, *rest]), Partition([batch, outs, *rest])
    shape = [outs, ins, *rest] if batch == 1 else [batch, outs, ins, *rest]
    if turned:  # output on other ranks than the input
        count = batch * outs * along
        P_y = Partition(P_y.shape, ranks=[3 - r for r in range(count)])
    kind = unn.DistributedGeneralConv1d if dims == 1 else unn.DistributedGeneralConv2d
    plain = nn.Conv1d if dims == 1 else nn.Conv2d
    options = {**case, "bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(P_x, P_y, Partition(shape), *channels, **options, weights=weights),
        lambda: plain(*channels, **options),
    )
    x = proof.drawn(2, channels[0], *space)
    proof.compare(ours, theirs, x, P_x, P_y, seed=seed)


@pytest.mark.ranks([2, 4])
@quick
@given(
    case=windows(dims=(1,)),
    per=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    splits_input=st.booleans(),
    seed=st.integers(0, 10),
)
def test_groups_of_split_channels_equal_torch(case, per, splits_input, seed, proof):
    size = unisono.world().size
    (length,) = case.pop("space")
    P_y, P_w = Partition([1, size, 1]), Partition([size, 1, 1])
    P_x = P_y if splits_input else Partition([1, 1, 1], ranks=[size - 1])
    options = {**case, "groups": 4, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: unn.DistributedGeneralConv1d(P_x, P_y, P_w, 4 * per[0], 4 * per[1], **options),
        lambda: nn.Conv1d(4 * per[0], 4 * per[1], **options),
    )
    proof.compare(ours, theirs, proof.drawn(2, 4 * per[0], length), P_x, P_y)


@pytest.mark.ranks(RANKS)
@quick
@given(
    case=windows(),
    extra=st.integers(0, 2),
    groups=st.sampled_from([1, 1, 2]),
    bias=st.booleans(),
    weights=st.sampled_from(["replicated", "replicated", "root"]),
    **common,
)
def test_transposed_convolutions_equal_torch(
    case, extra, groups, bias, weights, choice, seed, batch, proof
):
    space = case.pop("space")
    case.pop("padding_mode")
    dims = len(space)
    P = grid(choice, dims, unisono.world().size)
    steps = zip(case["stride"], case["dilation"], strict=True)
    case["output_padding"] = tuple(min(extra, max(s, d) - 1) for s, d in steps)
    ends = zip(
        space, case["kernel_size"], case["stride"], case["padding"], case["dilation"],
        case["output_padding"], strict=True,
    )  # fmt: skip
    if any((x - 1) * s - 2 * p + span(k, d) + o < 1 for x, k, s, p, d, o in ends):
        case["padding"] = (0,) * dims
    kind = getattr(unn, f"DistributedFeatureConvTranspose{dims}d")
    plain = getattr(nn, f"ConvTranspose{dims}d")
    options = {**case, "groups": groups, "bias": bias, "dtype": torch.float64}
    ours, theirs = proof.pair(
        lambda: kind(P, 4, 2, **options, weights=weights), lambda: plain(4, 2, **options)
    )
    proof.compare(ours, theirs, proof.drawn(batch, 4, *space), P, P, seed=seed)


DOUBLE = {"dtype": torch.float64}


@pytest.mark.ranks(4, timeout=60)
def test_disjoint_ranks_and_more_ranks_than_channels_work(proof):
    x, one = proof.drawn(2, 3, 6), Partition([1, 1, 1])
    apart = Partition([1, 2, 1], ranks=[2, 3]), Partition([2, 1, 1], ranks=[1, 2])
    compare_channels(proof, one, *apart, x, (3, 4), kernel_size=2)
    wide, last = Partition([1, 4, 1]), Partition([1, 1, 1], ranks=[3])
    compare_channels(proof, wide, last, wide, x, (3, 2), kernel_size=3, padding=1)


def compare_channels(proof, P_x, P_y, P_w, x, channels, weights="replicated", **case):
    """Compare a convolution whose weight is a grid of blocks."""
    ours, theirs = proof.pair(
        lambda: unn.DistributedGeneralConv1d(
            P_x, P_y, P_w, *channels, **case, **DOUBLE, weights=weights
        ),
        lambda: nn.Conv1d(*channels, **case, **DOUBLE),
    )
    proof.compare(ours, theirs, x, P_x, P_y)


@pytest.mark.ranks(2)
def test_blocks_in_channels_last_keep_their_layout():
    P = Partition([1, 1, 2, 1])
    layer = unn.DistributedFeatureConv2d(P, 2, 3, 3, padding=1)
    x = torch.randn(1, 2, 4, 8).contiguous(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(2)
def test_autocast_and_sixteen_bits_work(proof):
    P = Partition([1, 1, 2])
    torch.manual_seed(0)
    layer = unn.DistributedFeatureConv1d(P, 3, 4, 3, padding=1)
    plain = nn.Conv1d(3, 4, 3, padding=1)
    plain.load_state_dict(layer.state_dict())
    x = proof.drawn(2, 3, 10).float()
    where = P.local_slices(x.shape)
    with torch.autocast("cpu", torch.bfloat16):
        y, z = layer(x[where]), plain(x)
    assert y.dtype == z.dtype == torch.bfloat16
    there = P.local_slices(z.shape)
    torch.testing.assert_close(y, z[there], rtol=0.02, atol=0.02)
    y.sum().backward()
    half, whole = layer.bfloat16(), plain.bfloat16()
    y = half(x[where].bfloat16())
    torch.testing.assert_close(y, whole(x.bfloat16())[there], rtol=0.02, atol=0.02)


@pytest.mark.ranks(2)
def test_no_gradient_of_the_input_travels_where_nobody_wants_it():
    layer = unn.DistributedFeatureConv1d(Partition([1, 1, 2]), 2, 2, 3, padding=1)
    x = torch.ones(1, 2, 6)
    for wanted, messages in ((False, 0), (True, 1)):
        y = layer(x.clone().requires_grad_(wanted and unisono.world().rank == 0))
        with trace() as seen:
            y.sum().backward()
        assert sum(event.op == "exchange" for event in seen.events) == messages


def test_arguments_that_do_not_fit_are_refused():
    one = Partition([1, 1, 1])
    with pytest.raises(PartitionError, match="groups"):
        unn.DistributedFeatureConvTranspose1d(one, 3, 4, 2, groups=2)
    with pytest.raises(PartitionError, match="P_w must be"):
        unn.DistributedGeneralConv1d(one, one, Partition([1, 1]), 2, 2, 3)
    with pytest.raises(PartitionError, match="needs 4"):
        unn.DistributedGeneralConv2d(one, one, one, 2, 2, 3)


def block(x, P):
    """Return the own block of a whole tensor; without elements outside of the partition."""
    if not P.active:
        return x.new_empty(x.shape[0], 0)
    return x[P.local_slices(x.shape)].clone()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_halos_and_padding_wider_than_the_neighbours_block(mode, proof):
    P = Partition([1, 1, 3])
    for length, kernel, padding in ((6, 9, 4), (7, 11, 5), (3, 5, 2), (4, 4, 3)):
        case = {"kernel_size": kernel, "padding": padding, "padding_mode": mode}
        ours, theirs = proof.pair(
            lambda c=case: unn.DistributedFeatureConv1d(P, 2, 2, **c, dtype=torch.float64),
            lambda c=case: nn.Conv1d(2, 2, **c, dtype=torch.float64),
        )
        proof.compare(ours, theirs, proof.drawn(2, 2, length), P, P)
        proof.compare(ours, theirs, proof.drawn(2, 2, length), P, P, seed=5)


@pytest.mark.ranks(2)
def test_groups_that_rank_borders_cut_are_refused():
    P_y, P_w = Partition([1, 2, 1]), Partition([2, 1, 1])
    with pytest.raises(PartitionError, match="not whole groups"):
        unn.DistributedGeneralConv1d(P_y, P_y, P_w, 3, 9, 3, groups=3)


@pytest.mark.ranks(4)
def test_halo_bytes_grow_with_the_surface():
    P = Partition([1, 1, 2, 2])
    sent = []
    for size in (8, 16, 32):
        layer = unn.DistributedFeatureConv2d(P, 1, 1, 3, padding=1)
        x = torch.ones(P.local_shape((1, 1, size, size)))
        layer(x)
        with trace() as t, torch.no_grad():
            layer(x)
        sent.append(sum(e.sent for e in t.events if e.op == "exchange"))
    assert sent == [(2 * size // 2 + 1) * 4 for size in (8, 16, 32)]  # two sides and a corner


def test_the_selector_takes_the_layer_that_fits():
    one, image = Partition([1, 1, 1]), Partition([1, 1, 1, 1])
    assert type(DistributedConv1d(one, None, None, 2, 2, 3)) is DistributedFeatureConv1d
    assert type(DistributedConv2d(image, image, image, 2, 2, 3)) is DistributedChannelConv2d
    with pytest.raises(PartitionError, match="all three"):
        DistributedConv2d(image, image, None, 2, 2, 3)


@pytest.mark.ranks(2)
def test_the_selector_takes_the_general_layer_for_space():
    P = Partition([1, 1, 2, 1])
    assert type(DistributedConv2d(P, P, P, 2, 2, 3)) is DistributedGeneralConv2d

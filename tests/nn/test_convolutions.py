"""Split convolutions against torch's: in space, in channels, transposed; waiting or computing.

With overlap a convolution computes while messages travel; results are the same.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import unisono
import unisono.nn as unn
from unisono.comm import trace
from unisono.errors import PartitionError
from unisono.topology import Partition

CASES = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 5, "stride": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 2, "padding_mode": "reflect", "bias": False},
    {"kernel_size": 3, "padding": 1, "padding_mode": "replicate", "groups": 2},
    {"kernel_size": 7, "padding": "same"},
    {"kernel_size": 1, "stride": 3},
]
TRANSPOSED = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    {"kernel_size": 4, "stride": 3, "groups": 2, "bias": False},
    {"kernel_size": 1, "stride": 3},
]
DOUBLE = {"dtype": torch.float64}


@pytest.mark.ranks([1, 2, 3, 4], backend="gloo", timeout=60)
@pytest.mark.parametrize("overlap", ["auto", True, False])
def test_convolutions_of_lines_equal_torch(overlap, proof):
    size = unisono.world().size
    P = Partition([1, 1, size])
    length = 11 if size in (1, 4) else 23  # narrower than the halo, or wide enough for patches
    for case in CASES:
        ours, theirs = proof.pair(
            lambda c=case: unn.DistributedFeatureConv1d(P, 4, 6, **c, **DOUBLE, overlap=overlap),
            lambda c=case: nn.Conv1d(4, 6, **c, **DOUBLE),
        )
        proof.compare(ours, theirs, proof.drawn(2, 4, length), P, P)
        assert ours._setups == 1


@pytest.mark.ranks(4, backend="shm", timeout=60)
@pytest.mark.parametrize("overlap", [True, False])
def test_convolutions_of_images_equal_torch(overlap, proof):
    x = proof.drawn(3, 2, 13, 12)
    for shape, cases in (
        ([1, 1, 2, 2], CASES), ([2, 1, 2, 1], CASES[::2]), ([4, 1, 1, 1], CASES[::2])
    ):  # fmt: skip
        P = Partition(shape)
        for case in cases:
            options = {**case, **DOUBLE}
            ours, theirs = proof.pair(
                lambda P=P, o=options: unn.DistributedFeatureConv2d(P, 2, 4, **o, overlap=overlap),
                lambda o=options: nn.Conv2d(2, 4, **o),
            )
            proof.compare(ours, theirs, x, P, P)


@pytest.mark.ranks([1, 2, 3, 4])
def test_transposed_convolutions_of_lines_equal_torch(proof):
    P = Partition([1, 1, unisono.world().size])
    for case, weights in product(TRANSPOSED, ("replicated", "root")):
        ours, theirs = proof.pair(
            lambda c=case, w=weights: unn.DistributedFeatureConvTranspose1d(
                P, 4, 2, **c, **DOUBLE, weights=w
            ),
            lambda c=case: nn.ConvTranspose1d(4, 2, **c, **DOUBLE),
        )
        for length in (8, 2):
            proof.compare(ours, theirs, proof.drawn(2, 4, length), P, P)


@pytest.mark.ranks(4)
def test_transposed_convolutions_of_images_equal_torch(proof):
    for shape, case in product(([1, 1, 2, 2], [2, 1, 1, 2]), TRANSPOSED):
        P = Partition(shape)
        ours, theirs = proof.pair(
            lambda P=P, c=case: unn.DistributedFeatureConvTranspose2d(P, 2, 4, **c, **DOUBLE),
            lambda c=case: nn.ConvTranspose2d(2, 4, **c, **DOUBLE),
        )
        proof.compare(ours, theirs, proof.drawn(3, 2, 5, 4), P, P)


def compare_channels(proof, P_x, P_y, P_w, x, channels, weights="replicated", **case):
    """Compare a convolution whose weight is a grid of blocks."""
    ours, theirs = proof.pair(
        lambda: unn.DistributedGeneralConv1d(
            P_x, P_y, P_w, *channels, **case, **DOUBLE, weights=weights
        ),
        lambda: nn.Conv1d(*channels, **case, **DOUBLE),
    )
    proof.compare(ours, theirs, x, P_x, P_y)


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_every_split_of_channels_space_and_batch_equals_torch(weights, proof):
    for batch, ins, outs, space in product((1, 2), repeat=4):
        if batch * ins * outs * space <= 4:
            P_x, P_y = Partition([batch, ins, space]), Partition([batch, outs, space])
            P_w = Partition([outs, ins, space] if batch == 1 else [batch, outs, ins, space])
            x, case = proof.drawn(3, 5, 8), {"kernel_size": 3, "padding": 1}
            compare_channels(proof, P_x, P_y, P_w, x, (5, 7), weights, **case)


@pytest.mark.ranks(4, timeout=60)
def test_disjoint_ranks_and_more_ranks_than_channels_work(proof):
    x, one = proof.drawn(2, 3, 6), Partition([1, 1, 1])
    apart = Partition([1, 2, 1], ranks=[2, 3]), Partition([2, 1, 1], ranks=[1, 2])
    compare_channels(proof, one, *apart, x, (3, 4), kernel_size=2)
    wide, last = Partition([1, 4, 1]), Partition([1, 1, 1], ranks=[3])
    compare_channels(proof, wide, last, wide, x, (3, 2), kernel_size=3, padding=1)


@pytest.mark.ranks(2)
def test_large_convolutions_overlap_by_themselves_and_equal_torch():
    P = Partition([1, 1, 2, 1])
    torch.manual_seed(0)
    plain = nn.Conv2d(16, 16, 3, padding=1)
    x = torch.randn(1, 16, 256, 256, generator=torch.Generator().manual_seed(2))
    for make in (
        unn.DistributedFeatureConv2d,
        lambda P, *a, **k: unn.DistributedGeneralConv2d(P, P, P, *a, **k),
    ):
        torch.manual_seed(0)
        layer = make(P, 16, 16, 3, padding=1)
        where = P.local_slices(x.shape)
        for memory in (torch.contiguous_format, torch.channels_last):
            own = x[where].clone(memory_format=memory).requires_grad_()
            whole = x.clone().requires_grad_()
            y, z = layer(own), plain(whole)
            assert layer._plan.cover is not None
            assert y.is_contiguous(memory_format=memory)
            torch.testing.assert_close(y, z[where], rtol=1e-4, atol=1e-5)
            y.square().sum().backward()
            z.square().sum().backward()
            torch.testing.assert_close(own.grad, whole.grad[where], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-3, atol=1e-1)
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=1e-3, atol=1e-1)
        plain.zero_grad()
        small = layer(x[where][..., :8, :8])
        assert layer._plan.cover is None, "a small convolution is not worth patches"
        assert small.shape == (1, 16, 8, 8)


@pytest.mark.ranks(2)
def test_autocast_and_sixteen_bits_work_with_overlap(proof):
    P = Partition([1, 1, 2])
    torch.manual_seed(0)
    layer = unn.DistributedFeatureConv1d(P, 3, 4, 3, padding=1, overlap=True)
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
    P = Partition([1, 1, 2])
    for overlap in (True, False):
        layer = unn.DistributedFeatureConv1d(P, 2, 2, 3, padding=1, overlap=overlap)
        x = torch.ones(1, 2, 6)
        for wanted, messages in ((False, 0), (True, 1)):
            y = layer(x.clone().requires_grad_(wanted and P.root.rank == 0))
            with trace() as seen:
                y.sum().backward()
            assert sum(event.op == "exchange" for event in seen.events) == messages


def test_arguments_that_do_not_fit_are_refused():
    one = Partition([1, 1, 1])
    with pytest.raises(PartitionError, match="overlap='maybe'"):
        unn.DistributedFeatureConv1d(one, 1, 1, 3, overlap="maybe")
    with pytest.raises(PartitionError, match="groups"):
        unn.DistributedFeatureConvTranspose1d(one, 3, 4, 2, groups=2)
    with pytest.raises(PartitionError, match="P_w must be"):
        unn.DistributedGeneralConv1d(one, one, Partition([1, 1]), 2, 2, 3)
    with pytest.raises(PartitionError, match="needs 4"):
        unn.DistributedGeneralConv2d(one, one, one, 2, 2, 3)

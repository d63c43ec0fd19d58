"""Spatially split convolutions against torch's."""

from __future__ import annotations

import pytest
import torch

import unisono
from unisono.nn.layers.conv import DistributedFeatureConv1d, DistributedFeatureConv2d
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


def drawn(*shape):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def run_case(make, reference, P, x, channels, **case):
    """Run both and compare output, input gradient and parameter gradients."""
    torch.manual_seed(3)
    torch_case = {name: value for name, value in case.items() if name != "weights"}
    expected = reference(*channels, **torch_case, dtype=x.dtype)
    torch.manual_seed(3)
    layer = make(P, *channels, **case, dtype=x.dtype)
    if P.active and layer.weight.numel():
        assert torch.equal(layer.weight, expected.weight)
    block = x[P.local_slices(x.shape)].clone().requires_grad_() if P.active else x.new_empty(0)
    whole = x.clone().requires_grad_()
    y, z = layer(block), expected(whole)
    probe = torch.linspace(-1, 1, z.numel(), dtype=x.dtype).reshape(z.shape)
    if P.active:
        torch.testing.assert_close(y, z[P.local_slices(z.shape)])
        (y * probe[P.local_slices(z.shape)]).sum().backward()
    (z * probe).sum().backward()
    if P.active:
        torch.testing.assert_close(block.grad, whole.grad[P.local_slices(x.shape)])
        if layer.weight.numel():
            torch.testing.assert_close(layer.weight.grad, expected.weight.grad)
            if expected.bias is not None:
                torch.testing.assert_close(layer.bias.grad, expected.bias.grad)


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_conv1d_split_in_length_equals_torch(weights):
    size = unisono.world().size
    P = Partition([1, 1, size])
    for case in CASES:
        for length in (12, 11, 7) if weights == "replicated" else (11,):
            x = drawn(2, 4, length)
            if case.get("dilation") and length < 9:
                continue
            run_case(
                DistributedFeatureConv1d, torch.nn.Conv1d, P, x, (4, 6), **case, weights=weights
            )


@pytest.mark.ranks(4)
def test_conv2d_split_in_both_dims_and_batch_equals_torch():
    x = drawn(3, 2, 9, 7)
    some = CASES[::2]
    for shape, cases in (
        ([1, 1, 2, 2], CASES), ([2, 1, 2, 1], some), ([4, 1, 1, 1], some), ([1, 1, 4, 1], CASES)
    ):  # fmt: skip
        P = Partition(shape)
        for case in cases:
            if case["kernel_size"] in (5,):
                continue
            run_case(DistributedFeatureConv2d, torch.nn.Conv2d, P, x, (2, 4), **case)

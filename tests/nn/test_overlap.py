"""Convolutions that compute while messages travel, against those that wait, and torch's."""

from __future__ import annotations

import pytest
import torch

import unisono
from unisono.comm import trace
from unisono.errors import PartitionError
from unisono.nn import DistributedFeatureConv1d, DistributedFeatureConv2d, DistributedGeneralConv2d
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
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def derivatives(layer, x, probe):
    """Return value, first derivatives, and those of a function of the first."""
    y = layer(x)
    held = [x, *layer.parameters()]
    first = torch.autograd.grad((y**2 * probe).sum(), held, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), held, allow_unused=True)
    plain = torch.autograd.grad((layer(x) ** 2 * probe).sum(), held)
    return [y, *first, *second, *plain]


def compare(make, P, x, case):
    """Compare a layer that overlaps with one that does not, in everything."""
    own = x[P.local_slices(x.shape)].clone().requires_grad_()
    found = []
    for overlap in (True, False):
        torch.manual_seed(0)
        layer = make(P, overlap=overlap, dtype=x.dtype, **case)
        like = layer(own)
        probe = torch.linspace(-1, 1, like.numel(), dtype=x.dtype).view_as(like)
        found.append(derivatives(layer, own, probe))
        assert layer._setups == 1
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.ranks([1, 2, 3, 4], backend="gloo", timeout=60)
def test_overlap_changes_no_result_in_one_dim():
    size = unisono.world().size
    P = Partition([1, 1, size])
    length = 11 if size in (1, 4) else 23  # narrower than the halo, or wide enough for patches
    for case in CASES:
        make = lambda P, **kw: DistributedFeatureConv1d(P, 4, 6, **kw)  # noqa: E731
        compare(make, P, drawn(2, 4, length), case)


@pytest.mark.ranks(4, backend="shm", timeout=60)
def test_overlap_changes_no_result_in_two_dims():
    x = drawn(2, 2, 13, 12)
    for shape, cases in (([1, 1, 2, 2], CASES), ([2, 1, 2, 1], CASES[::2])):
        for case in cases:
            make = lambda P, **kw: DistributedFeatureConv2d(P, 2, 4, **kw)  # noqa: E731
            compare(make, Partition(shape), x, case)


@pytest.mark.ranks(2)
def test_large_convolutions_overlap_by_themselves_and_equal_torch():
    P = Partition([1, 1, 2, 1])
    torch.manual_seed(0)
    plain = torch.nn.Conv2d(16, 16, 3, padding=1)
    x = torch.randn(1, 16, 256, 256, generator=torch.Generator().manual_seed(2))
    for make in (
        DistributedFeatureConv2d,
        lambda P, *a, **k: DistributedGeneralConv2d(P, P, P, *a, **k),
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
def test_autocast_and_sixteen_bits_work_with_overlap():
    P = Partition([1, 1, 2])
    torch.manual_seed(0)
    layer = DistributedFeatureConv1d(P, 3, 4, 3, padding=1, overlap=True)
    plain = torch.nn.Conv1d(3, 4, 3, padding=1)
    plain.load_state_dict(layer.state_dict())
    x = drawn(2, 3, 10).float()
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
        layer = DistributedFeatureConv1d(P, 2, 2, 3, padding=1, overlap=overlap)
        x = torch.ones(1, 2, 6)
        for wanted, messages in ((False, 0), (True, 1)):
            y = layer(x.clone().requires_grad_(wanted and P.root.rank == 0))
            with trace() as seen:
                y.sum().backward()
            assert sum(event.op == "exchange" for event in seen.events) == messages


def test_an_unknown_choice_of_overlap_is_refused():
    with pytest.raises(PartitionError, match="overlap='maybe'"):
        DistributedFeatureConv1d(Partition([1, 1, 1]), 1, 1, 3, overlap="maybe")

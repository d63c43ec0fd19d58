"""Split pooling against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono import nn as p
from unisono.errors import PartitionError
from unisono.topology import Partition

MAX = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "dilation": 2},
]
AVG = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True, "count_include_pad": False},
]


@pytest.mark.ranks([1, 4], backend=["gloo", "shm"])
def test_pooling_equals_torch(proof):
    size = unisono.world().size
    lines, images = [[1, 1, size], [size, 1, 1], [1, size, 1]], []
    if size == 4:
        images = [[1, 1, 2, 2], [2, 1, 2, 1], [1, 1, 2, 1, 2]]
    for grid in (*lines, *images):
        P, dims = Partition(grid), len(grid) - 2
        x = proof.drawn(2, 4, 9, *(10, 5)[: dims - 1])
        for way, cases in (("Max", MAX), ("Avg", AVG)):
            for case in cases:
                ours = getattr(p, f"Distributed{way}Pool{dims}d")(P, **case)
                proof.compare(ours, getattr(nn, f"{way}Pool{dims}d")(**case), x, P, P)


@pytest.mark.ranks([1, 2, 3])
def test_averages_of_integers_are_rounded_as_torch_rounds_them():
    size = unisono.world().size
    cases = [*AVG, {"kernel_size": 3, "stride": 2, "padding": 1, "divisor_override": 4}]
    for ours, plain, shape in (
        (p.DistributedAvgPool1d, nn.AvgPool1d, (2, 2, 11)),
        (p.DistributedAvgPool2d, nn.AvgPool2d, (1, 2, 11, 5)),
        (p.DistributedAvgPool3d, nn.AvgPool3d, (1, 1, 11, 4, 3)),
    ):
        P = Partition([1, 1, size, *(1 for _ in shape[3:])])
        x = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(3))
        for case in cases[: -1 if len(shape) == 3 else None]:
            y, z = ours(P, **case)(x[P.local_slices(x.shape)]), plain(**case)(x)
            assert y.dtype == z.dtype
            assert torch.equal(y, z[P.local_slices(z.shape)]), (shape, case)
        with pytest.raises(PartitionError, match=r"torch.uint8[\s\S]*x.float"):
            ours(P, 3)(x[P.local_slices(x.shape)].to(torch.uint8))


@pytest.mark.ranks([1, 2, 3, 4])
def test_padding_wins_over_no_point_however_low():
    size = unisono.world().size
    grid = [2, 2] if size == 4 else [size, 1]
    cases = [*MAX[1:3], {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}]
    draw = torch.Generator().manual_seed(5)
    for dtype in (torch.float64, torch.int64, torch.uint8):
        lowest = -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min
        x = torch.randint(1, 9, (1, 2, 9, 7), generator=draw).to(dtype)
        x[0, 0], x[0, 1, :4] = lowest, lowest
        for case in cases:
            for kind, plain, shape, P in (
                (p.DistributedMaxPool1d, nn.MaxPool1d, (2, 7, 9), Partition([1, 1, size])),
                (p.DistributedMaxPool2d, nn.MaxPool2d, x.shape, Partition([1, 1, *grid])),
                (
                    p.DistributedMaxPool3d,
                    nn.MaxPool3d,
                    (1, 1, 3, 6, 7),
                    Partition([1, 1, 1, *grid]),
                ),
            ):
                leaf = x.reshape(shape).clone().requires_grad_(dtype.is_floating_point)
                own = leaf.detach()[P.local_slices(shape)].clone()
                own.requires_grad_(dtype.is_floating_point)
                y, indices = kind(P, **case, return_indices=True)(own)
                z, expected = plain(**case, return_indices=True)(leaf)
                where = P.local_slices(z.shape)
                assert torch.equal(y, z[where])
                assert torch.equal(indices, expected[where]), (shape, case, dtype)
                if dtype.is_floating_point:
                    probe = torch.arange(1.0, z.numel() + 1).reshape(z.shape)
                    kind(P, **case)(own).backward(probe[where])
                    z.backward(probe)
                    assert torch.equal(own.grad, leaf.grad[P.local_slices(shape)])

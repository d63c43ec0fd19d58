"""Convolutions split in channels against torch's."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from unisono import nn as g
from unisono.errors import PartitionError
from unisono.topology import Partition


def drawn(*shape):
    """Return the same float64 tensor on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compare(P_x, P_y, P_w, x, channels, **case):
    """Run both and compare output, input gradient and the joined parameter gradients."""
    weights = case.pop("weights", "replicated")
    torch.manual_seed(3)
    expected = torch.nn.Conv1d(*channels, **case, dtype=x.dtype)
    torch.manual_seed(3)
    layer = g.DistributedGeneralConv1d(
        P_x, P_y, P_w, *channels, **case, dtype=x.dtype, weights=weights
    )
    for name, value in layer.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    own = x[P_x.local_slices(x.shape)].clone() if P_x.active else x.new_empty(x.shape[0], 0)
    own.requires_grad_()
    whole = x.clone().requires_grad_()
    y, z = layer(own), expected(whole)
    probe = torch.linspace(-1, 1, z.numel(), dtype=x.dtype).reshape(z.shape)
    if P_y.active:
        torch.testing.assert_close(y, z[P_y.local_slices(z.shape)])
        (y * probe[P_y.local_slices(z.shape)]).sum().backward()
    else:
        assert y.numel() == 0
        y.sum().backward()
    (z * probe).sum().backward()
    if P_x.active:
        torch.testing.assert_close(own.grad, whole.grad[P_x.local_slices(x.shape)])
    for name, holding in layer._holdings.items():
        if 0 not in holding.shape:
            mine = getattr(layer, name).grad
            torch.testing.assert_close(mine, getattr(expected, name).grad[holding.slices])


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_every_split_of_channels_space_and_batch_equals_torch(weights):
    x = drawn(3, 5, 8)
    for batch, ins, outs, space in product((1, 2), (1, 2), (1, 2), (1, 2)):
        if batch * ins * outs * space > 4:
            continue
        P_x = Partition([batch, ins, space])
        P_y = Partition([batch, outs, space])
        shape = [outs, ins, space] if batch == 1 else [batch, outs, ins, space]
        compare(P_x, P_y, Partition(shape), x, (5, 7), kernel_size=3, padding=1, weights=weights)


@pytest.mark.ranks(4, timeout=60)
def test_groups_are_fetched_across_rank_borders():
    for outs, ins, groups, space in ((4, 1, 3, 1), (2, 2, 3, 1), (3, 4, 6, 1), (2, 1, 6, 2)):
        P_x, P_y = Partition([1, ins, space]), Partition([1, outs, space])
        for channels in ((6, 12), (6, 6)):
            x = drawn(2, channels[0], 7)
            compare(
                P_x, P_y, Partition([outs, 1, space]), x, channels,
                kernel_size=3, padding=1, groups=groups,
            )  # fmt: skip


@pytest.mark.ranks(4, timeout=60)
def test_disjoint_ranks_and_more_ranks_than_channels_work():
    x = drawn(2, 3, 6)
    apart = Partition([1, 1, 1], ranks=[0]), Partition([1, 2, 1], ranks=[2, 3])
    compare(*apart, Partition([2, 1, 1], ranks=[1, 2]), x, (3, 4), kernel_size=2)
    compare(
        Partition([1, 4, 1]), Partition([1, 1, 1], ranks=[3]), Partition([1, 4, 1]), x, (3, 2),
        kernel_size=3, padding=1,
    )  # fmt: skip


def test_partitions_that_do_not_fit_are_refused():
    one = Partition([1, 1, 1])
    with pytest.raises(PartitionError, match="P_w must be"):
        g.DistributedGeneralConv1d(one, one, Partition([1, 1]), 2, 2, 3)
    with pytest.raises(PartitionError, match="a tensor has 4"):
        g.DistributedGeneralConv2d(one, one, one, 2, 2, 3)

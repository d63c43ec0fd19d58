"""Windows and padding of split tensors, and the convolution selector."""

from __future__ import annotations

import pytest
import torch

from unisono.errors import PartitionError
from unisono.nn.layers.conv import (
    DistributedChannelConv2d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedFeatureConv1d,
    DistributedGeneralConv2d,
)
from unisono.nn.layers.halo import DistributedPad, HaloExchange
from unisono.topology import Partition


@pytest.mark.ranks(3)
def test_padding_without_balance_grows_the_ends_only():
    P = Partition([3])
    x = torch.arange(7.0)
    y = DistributedPad(P, (2, 1), value=9.0)(x[P.local_slices(x.shape)])
    expected = ([9.0, 9.0, 0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 9.0])
    assert y.tolist() == expected[P.root.rank]
    y = DistributedPad(P, (-4, 1))(x[P.local_slices(x.shape)])
    assert y.tolist() == ([], [4.0], [5.0, 6.0, 0.0])[P.root.rank]


@pytest.mark.ranks(2)
def test_windows_hold_the_points_of_neighbours():
    P = Partition([2])
    own = torch.arange(6.0)[P.local_slices([6])].requires_grad_()
    layer = HaloExchange.from_widths(P, [(1, 1)], "circular")
    y = layer(own)
    assert y.tolist() == ([5, 0, 1, 2, 3], [2, 3, 4, 5, 0])[P.root.rank]
    y.sum().backward()
    assert own.grad.tolist() == [2, 1, 2]


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

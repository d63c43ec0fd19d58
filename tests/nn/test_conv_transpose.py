"""Split transposed convolutions against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import PartitionError
from unisono.nn.layers.conv_transpose import (
    DistributedFeatureConvTranspose1d,
    DistributedFeatureConvTranspose2d,
)
from unisono.testing import check_parity
from unisono.topology import Partition

CASES = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    {"kernel_size": 4, "stride": 3, "groups": 2, "bias": False},
    {"kernel_size": 1, "stride": 3},
]


def pair(kind, plain, P, channels, case, **more):
    """Return both layers with the same weights."""
    torch.manual_seed(0)
    ours = kind(P, *channels, **case, **more, dtype=torch.float64)
    torch.manual_seed(0)
    return ours, plain(*channels, **case, dtype=torch.float64)


@pytest.mark.ranks([1, 2, 3, 4])
def test_transposed_convolution_of_lines_equals_torch():
    size = unisono.world().size
    P = Partition([1, 1, size])
    for case in CASES:
        for length in (8, 5, 2):
            layers = pair(DistributedFeatureConvTranspose1d, nn.ConvTranspose1d, P, (4, 2), case)
            check_parity(*layers, (2, 4, length), P)


@pytest.mark.ranks(4)
def test_transposed_convolution_of_images_equals_torch():
    for shape in ([1, 1, 2, 2], [2, 1, 1, 2]):
        P = Partition(shape)
        for case in CASES:
            layers = pair(DistributedFeatureConvTranspose2d, nn.ConvTranspose2d, P, (2, 4), case)
            check_parity(*layers, (3, 2, 5, 4), P)


@pytest.mark.ranks(2)
def test_weights_on_the_root_give_the_same():
    P = Partition([1, 1, 2])
    kind, plain = DistributedFeatureConvTranspose1d, nn.ConvTranspose1d
    check_parity(*pair(kind, plain, P, (4, 2), CASES[1], weights="root"), (2, 4, 5), P)


def test_channels_must_be_multiples_of_groups():
    with pytest.raises(PartitionError, match="groups"):
        DistributedFeatureConvTranspose1d(Partition([1, 1, 1]), 3, 4, 2, groups=2)

"""The report of what a split network will send."""

from __future__ import annotations

import pytest
from torch import nn

from unisono.errors import PartitionError
from unisono.nn import plan_report
from unisono.topology import Partition


def rows(net, shape, partition):
    """Return the table's rows as lists of words."""
    return [line.split() for line in plan_report(net, shape, partition).splitlines()[1:]]


def test_halo_bytes_are_counted_without_a_world():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    conv, relu, pool, flat = rows(net, (2, 3, 16, 8), Partition([1, 1, 2, 1]))
    assert conv[1:] == ["Conv2d", "2x8x8x8", "0/1,", "0/0", "1", str(2 * 3 * 8 * 4), "12%"]
    assert relu[-3:] == ["0", "0", "-"]
    assert pool[2] == "2x8x4x4"
    assert flat[2] == "whole"


def test_bytes_grow_with_the_surface_not_the_volume():
    net = nn.Conv2d(1, 1, 3, padding=1)
    sent = [
        int(rows(net, (1, 1, n, n), Partition([1, 1, 2, 1]))[0][-2].replace(",", ""))
        for n in (128, 256, 512)
    ]
    assert sent == [512, 1024, 2048]


def test_sizes_change_through_upsampling_and_transposed_layers():
    net = nn.Sequential(nn.Upsample(scale_factor=2), nn.ConvTranspose1d(2, 4, 2, stride=2))
    up, transposed = rows(net, (1, 2, 6), Partition([1, 1, 2]))
    assert up[2] == "1x2x6"
    assert transposed[2] == "1x4x12"


def test_a_partition_is_needed():
    with pytest.raises(PartitionError, match="no partition"):
        plan_report(nn.Conv1d(1, 1, 3), (1, 1, 8))

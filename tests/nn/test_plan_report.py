"""The report of what a split network will send."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono.comm import trace
from unisono.errors import PartitionError
from unisono.nn import DistributedLinear, distribute, plan_report
from unisono.topology import Partition


def rows(net, shape, partition=None, **options):
    """Return the table's rows: name of a column -> cell."""
    head, *lines = plan_report(net, shape, partition, **options).splitlines()
    names = ["layer", "kind", "own output", "halo", "messages", "bytes sent", "boundary"]
    starts = [head.index(name) for name in names]
    ends = [*starts[1:], None]
    return [
        {name: line[a:b].strip() for name, a, b in zip(names, starts, ends, strict=True)}
        for line in lines
    ]


def sent(row):
    """Return the bytes of a row."""
    return int(row["bytes sent"].replace(",", ""))


def test_halo_bytes_are_counted_without_a_world():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    conv, relu, pool, join, flat = rows(net, (2, 3, 16, 8), Partition([1, 1, 2, 1]))
    assert list(conv.values()) == ["0", "Conv2d", "2x8x8x8", "0/1, 0/0", "1", "192", "12%"]
    assert list(relu.values())[3:] == ["-", "0", "0", "-"]
    assert pool["own output"] == "2x8x4x4"
    assert (join["kind"], join["own output"], join["halo"]) == ("Join", "2x8x8x4", "all_gather")
    assert (flat["own output"], flat["messages"]) == ("2x256", "0")


def test_bytes_grow_with_the_surface_not_the_volume():
    net = nn.Conv2d(1, 1, 3, padding=1)
    found = [sent(rows(net, (1, 1, n, n), Partition([1, 1, 2, 1]))[0]) for n in (128, 256, 512)]
    assert found == [512, 1024, 2048]


def test_sizes_change_through_layers_and_a_shared_layer_stands_where_it_is_called():
    relu = nn.ReLU()
    net = nn.Sequential(
        nn.Upsample(scale_factor=2), relu, nn.ConvTranspose1d(2, 4, 2, stride=2), relu,
        nn.AdaptiveAvgPool1d(1), nn.Dropout(0.5),
    )  # fmt: skip
    found = rows(net, (1, 2, 6), Partition([1, 1, 2]))
    assert [row["layer"] for row in found] == list("012345")
    assert [row["kind"] for row in found][1::2] == ["ReLU", "ReLU", "Dropout"]
    shapes = ["1x2x6", "1x2x6", "1x4x12", "1x4x12", "1x4x1", "1x4x1"]
    assert [row["own output"] for row in found] == shapes


def test_what_distribute_or_a_layer_refuses_is_refused():
    P, alone = Partition([1, 1, 2, 1]), Partition([1, 1])
    with pytest.raises(PartitionError, match="no partition"):
        plan_report(nn.Conv1d(1, 1, 3), (1, 1, 8))
    with pytest.raises(PartitionError, match="0 is an LSTM"):
        plan_report(nn.Sequential(nn.LSTM(4, 4)), (1, 4, 8, 8), P)
    with pytest.raises(PartitionError, match="with a DistributedLinear"):
        plan_report(DistributedLinear(alone, alone, alone, 2, 2), (1, 2))
    with pytest.raises(PartitionError, match="1 channels != 3"):
        plan_report(nn.Sequential(nn.Conv2d(3, 4, 3)), (1, 1, 8, 8), P)


class Skips(nn.Module):
    """A small net with a forward of its own, in which channels are joined."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        return self.second(torch.cat([y, y.relu()], 1))


NETS = {
    "conv": nn.Conv2d(2, 3, 5, stride=2, padding=2),
    "transposed": nn.ConvTranspose2d(2, 1, 4, 2, 1),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "batch norm": nn.BatchNorm2d(2),
    "batch norm of running statistics": nn.BatchNorm2d(2).eval(),
    "layer norm": nn.LayerNorm([2, 9, 8]),
    "group norm": nn.GroupNorm(1, 2),
    "instance norm": nn.InstanceNorm2d(2),
    "tracked instance norm": nn.InstanceNorm2d(2, track_running_stats=True),
    "tracked instance norm in eval": nn.InstanceNorm2d(2, track_running_stats=True).eval(),
    "reflected": nn.ReflectionPad2d((2, 1, 3, 0)),
    "cropped and grown": nn.ConstantPad2d((0, 0, -1, 4), 0.5),
    "around": nn.CircularPad2d(2),
    "channels dropped": nn.Dropout2d(),
    "pool": nn.MaxPool2d(3, padding=1),
    "mean": nn.AdaptiveAvgPool2d(1),
    "gathered": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)),
    "flattened": nn.Flatten(),
    "nothing": nn.GELU(),
}


def traced(net, x):
    """Return the bytes that this rank sends in a forward of a network that is set up."""
    net(x)
    with trace() as record:
        net(x)
    return sum(event.sent for event in record.events if event.dtype != "int32")


@pytest.mark.ranks([2, 4])
def test_figures_are_those_of_the_trace():
    size = unisono.world().size
    shape = (3, 2, 9, 8)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for grid in [[1, 1, size, 1], [2, 1, 1, 2]][: size // 2]:
        P = Partition(grid)
        own = x[P.local_slices(shape)]
        for name, layer in NETS.items():
            plain = nn.Sequential(layer)
            net = distribute(plain, P)
            found = unisono.world().all_gather_object(traced(net, own))
            told = rows(plain, shape, P)
            assert sum(map(sent, told)) == max(found), (name, P, told, found)
            assert (max(found) > 0) == any(row["messages"] != "0" for row in told), name
            again = rows(net, shape) if "Distributed" in str([*net.children()]) else told
            assert list(map(sent, again)) == list(map(sent, told)), name

    P = Partition([1, 1, size, 1])
    x = torch.randn(2, 1, 16, 8)
    net = distribute(Skips(), P, custom="recurse")
    found = unisono.world().all_gather_object(traced(net, x[P.local_slices(x.shape)]))
    assert sum(map(sent, rows(Skips(), x.shape, P))) == max(found)

"""What topology refuses, in a plain process: each mistake with the numbers that do not fit."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from unisono.comm import Communicator, world
from unisono.errors import MeshError, PartitionError
from unisono.topology import (
    Mesh,
    Partition,
    RowPlan,
    broadcast_groups,
    decompose,
    halo,
    reduce_groups,
)
from unisono.topology.overlap import overlaps, repartition_plan
from unisono.topology.resample import Resampling
from unisono.topology.window import check_pool, output_length, transposed_length

ROWS = [(0, 4, 5), (0, 4)]
COLUMNS = [(0, 5), (0, 2, 3, 4)]


def layout(*shape: int) -> SimpleNamespace:
    """Ranks in a grid."""
    return SimpleNamespace(shape=shape, ranks=tuple(range(math.prod(shape))))


def rows(index: list, sends: tuple[int, ...], recvs: tuple[int, ...]) -> RowPlan:
    """Rows of a block of five."""
    return RowPlan(5, torch.tensor(index), sends, recvs)


DECOMPOSE = [
    (lambda: decompose.split_sizes(-1, 2), ["-1 < 0"]),
    (lambda: decompose.split_sizes(4, 0), ["0 < 1"]),
    (lambda: decompose.block(4, 2, 2), ["not 0 <= 2 < 2"]),
    (lambda: decompose.bounds((2, -3)), ["-3 < 0"]),
    (lambda: decompose.check_cuts([(0, 3, 2)]), ["b_0 <= b_1"]),
    (lambda: decompose.check_cuts([(1, 3)]), ["cuts [1, 3] in dim 0"]),
]
HALO = [
    (lambda: halo.plan([(0, 2, 4)], (0,), 9, padding=1), ["X + 2p < K: 4 + 2 < 9", "dim 0"]),
    (lambda: halo.plan([(0, 4)], (0,), 9, padding=((1, 2),)), ["X + pl + pr < K: 4 + 1 + 2 < 9"]),
    (lambda: halo.plan([(0, 2, 4)], (0,), 3, padding=4, padding_mode="reflect"),
     ["p >= X: 4 >= 4", "reflect padding below 4"]),
    (lambda: halo.plan([(0, 2, 4)], (0,), 3, padding=5, padding_mode="circular"), ["p > X: 5 > 4"]),
    (lambda: halo.plan([(0, 4)], (0,), 3, padding_mode="mirror"), ["'mirror'", "'reflect'"]),
    (lambda: halo.plan([(0, 4)], (0,), 3, padding="all"), ["'all'"]),
    (lambda: halo.plan([(0, 4)], (0,), 3, stride=2, padding="same"), ["2 != 1"]),
    (lambda: halo.plan([(0, 4)], (0,), 3, stride=0), ["stride: 0 < 1"]),
    (lambda: halo.plan([(0, 4)], (0,), 3, padding=-1), ["padding: -1 < 0"]),
    (lambda: halo.plan([(0, 4)], (0,), (3, 3)), ["2 > 1"]),
    (lambda: halo.plan([(0, 4), (0, 4)], (0, 0), (3, 3), stride=(1, 1, 1)), ["3 != 2"]),
    (lambda: halo.plan([(0, 4), (0, 4)], (0, 0), (3, 3), padding=(1, 1, 1)), ["3 != 2"]),
    (lambda: halo.plan([(0, 2, 4)], (2,), 3),
     ["index [2]", "shape [2]", "last rank are [1]"]),
    (lambda: halo.plan([(0, 2, 4)], (0, 0), 3), ["one coordinate for each of the 1 dims"]),
    (lambda: halo.plan([(0, 5, 4)], (0,), 3), ["cuts [0, 5, 4]"]),
    (lambda: halo.plan([(0, 4)], (0,), 3, padding_mode="circular", ceil_mode=True), ["ceil_mode"]),
    (lambda: output_length(2, 3, 2), ["2 + 0 < 3"]),
    (lambda: check_pool(3, 2, dim=2), ["2 > 3 // 2 = 1"]),
    (lambda: transposed_length(5, 3, 2, 1, 1, output_padding=2), ["2 >= 2"]),
    (lambda: transposed_length(1, 1, 1, 1), ["= -1 < 1"]),
    (lambda: transposed_length(4, 3, 0), ["dilation >= 1"]),
    (lambda: Resampling(4, 8, "area"), ["'nearest-exact'"]),
    (lambda: Resampling(4, 8, "nearest", align_corners=True), ["align_corners"]),
]  # fmt: skip
BETWEEN = [
    (lambda: overlaps(ROWS, (0, 1), [(0, 5)], (0,), 0), ["[5, 4] points before, of [5] after"]),
    (lambda: overlaps(ROWS, (0, 1), [(0, 6), (0, 4)], (0,), 0), ["of [6, 4] after"]),
    (lambda: overlaps(ROWS, (0,), COLUMNS, (1, 2, 3), 0), ["2 blocks, 1 different ranks"]),
    (lambda: overlaps(ROWS, (0, 0), COLUMNS, (1, 2, 3), 0), ["2 blocks, 1 different ranks"]),
    (lambda: repartition_plan(ROWS, (0, 1), (1,), (0,), 0), ["2 != 1"]),
    (lambda: repartition_plan([(0, 1), (0, 4)], (0,), (2, 1), (0, 1), 0),
     ["global size 1 in dim 0", "1 point over 2 ranks", "Broadcast"]),
    (lambda: broadcast_groups(layout(3), layout(3, 2)),
     ["compared shapes [1, 3] and [3, 2]", "dim 1: 3 against 2"]),
    (lambda: broadcast_groups(layout(1, 2), layout(2)), ["2 dims against 1"]),
    (lambda: reduce_groups(layout(3, 2), layout(2, 2)), ["sum-reduce between"]),
    (lambda: rows([0, 5], (1, 1), (0, 0)), ["not 0 <= 5 < 5"]),
    (lambda: rows([-1], (1,), (0,)), ["not 0 <= -1 < 5"]),
    (lambda: rows([0, 1], (1, 2), (0, 0)), ["3 != 2"]),
    (lambda: rows([0], (1,), (0, 0)), ["1 ranks != 2 ranks"]),
    (lambda: rows([0], (2, -1), (0, 0)), ["counts of 0 or more"]),
    (lambda: rows([0.0], (1,), (0,)), ["torch.float32"]),
    (lambda: rows([[0]], (1,), (0,)), ["shape (1, 1)"]),
]  # fmt: skip
PARTITION = [
    (
        lambda: Partition([2, 3], ranks=range(8)),
        ["2 * 3 = 6 != 8 ranks", "HINT: Partition([2, 4])"],
    ),
    (lambda: Partition([2, 0]), ["0 < 1"]),
    (lambda: Partition([]), ["0 dims"]),
    (lambda: Partition([3], ranks=(0, 1, 1)), ["rank 1 more than once", "2 different ranks for 3"]),
    (lambda: Partition([2], ranks=(0, -1)), ["rank -1 < 0"]),
    (lambda: Partition([2], comm=world()), ["2 > 1", "HINT: Partition([1])"]),
    (lambda: Partition([1], ranks=(3,), comm=world()), ["rank 3 >= 1"]),
    (lambda: Partition([2]).index_of(2), ["not 0 <= 2 < 2"]),
    (lambda: Partition([2, 2]).rank_at([1]), ["1 coordinates, 2 dims"]),
    (lambda: Partition([2, 2]).rank_at([1, 2]), ["index [1, 2]", "shape [2, 2]"]),
    (lambda: Partition([2, 2]).local_shape([4, 4, 4], 0), ["3 dims != 2 dims", "[4, 4, 4]"]),
    (lambda: Partition([2, 2]).sub([2], rank=0), ["not 0 <= 2 < 2"]),
    (lambda: Partition([2, 2]).reshape([3]), ["3 != 4 ranks", "HINT: Partition([4])"]),
    (lambda: Partition.from_mesh(Mesh(h=1), {"h": 2}, ndim=2), ["not 0 <= 2 < 2"]),
    # the own place in a world that is too small
    (lambda: Partition([2, 2]).active, ["2 * 2 = 4 > 1", "unisono.run(fn, ranks=4)"]),
    (lambda: Partition([2, 2]).comm, ["2 * 2 = 4 > 1", "unisono.run(fn, ranks=4)"]),
    (lambda: Partition([2, 2]).index, ["2 * 2 = 4 > 1", "unisono.run(fn, ranks=4)"]),
    (lambda: Partition([2, 2]).local_shape([4, 4]), ["2 * 2 = 4 > 1", "unisono.run(fn, ranks=4)"]),
]
MESH = [
    (lambda: Mesh(data=2), ["data(2) != ranks(1)", "unisono.run(fn, ranks=2)"]),
    (lambda: Mesh(), ["no axes"]),
    (lambda: Mesh(data=0), ["data(0) < 1"]),
    (lambda: Mesh(data=-1, graph=-1), ["-1 on 2 axes: data, graph"]),
    (lambda: Mesh(data=-1, graph=2), ["graph(2) = 2 does not divide ranks(1)"]),
    (lambda: Mesh(comm=2), ["'comm' is an option", '{"comm": 2}']),
    (lambda: Mesh({"data": 1}, space=1), ["as keywords"]),
    (lambda: Mesh({"": 1}), ["axis name ''"]),
    (lambda: Mesh(data=1).comm("graph"), ["axis 'graph'", "HINT: one of 'data'"]),
    (lambda: Mesh(data=1, h=1).ranks_along("h", "h"), ["named twice"]),
    (lambda: Mesh(data=1).ranks_along("data", rank=1), ["rank=1", "1 >= 1"]),
    (lambda: Mesh(data=1).ranks_along("data", rank=-1), ["rank=-1", "-1 < 0"]),
    (lambda: Communicator.of(Mesh(data=1, h=1)), ["data(1), h(1)", "axis='data'"]),
    (lambda: Mesh(data=1).device_mesh, ["not initialised", "unisono.run"]),
]
CASES = [
    *((PartitionError, *case) for case in [*DECOMPOSE, *HALO, *BETWEEN, *PARTITION]),
    *((MeshError, *case) for case in MESH),
]


@pytest.mark.parametrize(("error", "call", "texts"), CASES, ids=[case[2][0] for case in CASES])
def test_what_does_not_fit_is_refused_with_its_numbers_and_a_hint(error, call, texts) -> None:
    with pytest.raises(error, match="HINT") as caught:
        call()
    for text in texts:
        assert text in str(caught.value)

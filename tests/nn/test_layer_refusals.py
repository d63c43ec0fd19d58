"""Inputs that cannot work: one error on all ranks, with the numbers and a hint, and no hang."""

from __future__ import annotations

import pytest
import torch

import unisono
import unisono.nn as unn
from unisono.errors import CollectiveMismatch, PartitionError
from unisono.topology import Partition


def refused(call, *words, kind=PartitionError):
    """Check that all ranks raise alike; the ranks can go on together afterwards."""
    comm = unisono.world()
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"nothing was raised; expected {words}")
    said = comm.all_gather_object(text)
    first = {part.partition("\n  on rank ")[0] for part in said}
    assert len(first) == 1, said
    assert "HINT:" in text, text
    for word in words:
        assert word in text, f"{word!r} is not in\n{text}"
    assert comm.all_reduce(torch.ones(1)).item() == comm.size


def ones(*shape, **options):
    return torch.ones(shape, **options)


@pytest.mark.ranks(2)
def test_dims_that_do_not_match():
    P, Q = Partition([1, 2]), Partition([1, 1, 2])
    refused(lambda: unn.Repartition(P, Q), "2 and 3 dims", "2 != 3")
    for layer in (
        unn.Repartition(P, Partition([2, 1])), unn.AllGather(P, 1), unn.DistributedPad(P, (1, 1)),
        unn.DistributedMSELoss(P), unn.DistributedBatchNorm(P, 3), unn.DistributedLayerNorm(P, 3),
    ):  # fmt: skip
        inputs = [ones(2, 3, 4)] * (2 if isinstance(layer, unn.DistributedMSELoss) else 1)
        refused(lambda m=layer, i=inputs: m(*i), "3 tensor dims, 2 partition dims", "[2, 3, 4]")
    refused(lambda: unn.DistributedFeatureConv2d(Q, 1, 1, 3), "3 dims", "needs 4 dims")
    refused(lambda: unn.DistributedMaxPool1d(P, 2), "2 dims", "needs 3")
    refused(lambda: unn.DistributedBatchNorm(Partition([2]), 3), "1 dims", "2 to 5")
    refused(lambda: unn.DistributedCrossEntropyLoss(Partition([2])), "1 dims")


@pytest.mark.ranks(2)
def test_one_point_cannot_be_spread_over_ranks():
    layer = unn.Repartition(Partition([2, 1]), Partition([1, 2]))
    refused(lambda: layer(ones(3, 1)), "1 point over 2 ranks", "dim 1", "Broadcast")
    assert layer(ones(3, 2)).shape == (6, 1)  # the layer is none the worse


@pytest.mark.ranks(4)
def test_blocks_that_are_no_grid_or_differ_in_kind():
    P = Partition([2, 2])
    rank = unisono.world().rank
    layer = unn.Repartition(P, Partition([4, 1]))
    refused(
        lambda: layer(ones(2 + (rank == 3), 2)), "dim 0, index 1: 2 and 3 points", "rank 3: [3, 2]"
    )
    kinds = (torch.float32, torch.float64)
    refused(
        lambda: layer(ones(2, 2, dtype=kinds[rank == 2])), "rank 2: torch.float64", "differ",
        kind=CollectiveMismatch,
    )  # fmt: skip
    refused(lambda: layer(ones(2, 2) if rank else ones(2)), "1 tensor dims, 2 partition dims")
    refused(
        lambda: unn.AllSumReduce(P, axes_reduce=int(rank == 3))(ones(2)), "arguments of the layer",
        kind=CollectiveMismatch,
    )  # fmt: skip
    refused(lambda: unn.AllSumReduce(P, 0)(ones(2 + (rank == 2))), "rank 2: [3]", "shapes differ")
    refused(lambda: unn.ReduceScatter(P, 0)(ones(2 + (rank == 2), 2)), "rank 2: [3, 2]")
    refused(lambda: unn.SumReduce(P, Partition([1, 1]))(ones(1 + rank)), "rank 1: [2]")
    refused(lambda: unn.DistributedMSELoss(P)(ones(2, 2), ones(2, 2 + (rank % 2))), "target of")
    assert layer(ones(2, 2)).shape == (1, 4)


@pytest.mark.ranks(2)
def test_partitions_of_different_communicators():
    world = unisono.world()
    other = world.split(0, key=-world.rank)  # the same ranks in the other order
    P, Q = Partition([2]), Partition([2], comm=other)
    for call in (
        lambda: unn.Repartition(P, Q),
        lambda: unn.Broadcast(P, Q),
        lambda: unn.DistributedLinear(Partition([1, 2]), Partition([1, 1], comm=other),
                                      Partition([1, 2]), 3, 3),
    ):  # fmt: skip
        refused(call, "root communicators", "'world'", "comm=")


@pytest.mark.ranks(2)
def test_axes_that_make_no_sense():
    P = Partition([2, 1])
    for layer, name in ((unn.AllSumReduce, "axes_reduce"), (unn.AllGather, "axes_all_gather"),
                        (unn.ReduceScatter, "axes_reduce_scatter")):  # fmt: skip
        refused(lambda k=layer: k(P), "neither given", name)
        refused(lambda k=layer: k(P, 0, 1), "both given", name)
        refused(lambda k=layer: k(P, 2), "2 >= 2")
    for layer in (unn.AllGather, unn.ReduceScatter):
        refused(lambda k=layer: k(P, (0, 1)), "axes [0, 1]", "2 != 1")


@pytest.mark.ranks(4)
def test_three_partitions_that_do_not_fit_each_other():
    general = unn.DistributedGeneralConv1d
    x, y = Partition([1, 2, 1]), Partition([1, 2, 1])
    shapes = ("P_x [1, 2, 1]", "P_y [1, 2, 1]")
    refused(lambda: general(x, y, Partition([2, 1, 2]), 4, 4, 3), *shapes, "P_w must be [2, 2, 1]")
    refused(
        lambda: general(x, Partition([1, 2, 2]), Partition([2, 2, 1]), 4, 4, 3),
        "[1, 1] != [1, 2]",
    )
    refused(lambda: general(x, y, Partition([2, 2, 1]), 4, 4, 3, groups=2), "groups take 1")
    refused(lambda: unn.DistributedConv1d(x, y, None, 4, 4, 3), "P_x alone, or all three")
    flat = Partition([1, 2])
    refused(
        lambda: unn.DistributedLinear(flat, flat, Partition([1, 2]), 4, 4),
        "P_x [1, 2], P_y [1, 2], P_w [1, 2]", "P_w must be [2, 2]",
    )  # fmt: skip
    refused(
        lambda: unn.DistributedLinear(flat, Partition([2, 1]), Partition([2, 2]), 4, 4),
        "[1] != [2]",
    )
    refused(lambda: unn.DistributedFeatureConv1d(x, 4, 4, 3), "2 in channels")


@pytest.mark.ranks(2)
def test_windows_larger_than_the_tensor():
    P = Partition([1, 1, 2])
    x = ones(1, 1, 2)
    conv = unn.DistributedFeatureConv1d
    refused(lambda: conv(P, 1, 1, 9, padding=1)(x), "X + 2p < K: 4 + 2 < 9")
    refused(lambda: conv(P, 1, 1, 3, padding=4, padding_mode="reflect")(x), "p >= X: 4 >= 4")
    refused(lambda: conv(P, 1, 1, 3, padding=5, padding_mode="circular")(x), "p > X: 5 > 4")
    refused(lambda: unn.DistributedMaxPool1d(P, 6)(x), "4 + 0 < 6")
    refused(lambda: unn.DistributedAvgPool1d(P, 3, padding=2), "2 > 3 // 2")
    refused(lambda: unn.DistributedPad(P, (4, 0), "reflect")(x), "4 >= 4")
    refused(lambda: unn.DistributedPad(P, (-3, -3))(x), "4 + -3 + -3 < 0")
    refused(lambda: unn.HaloExchange(P, (9,))(x), "4 + 0 < 9")
    refused(lambda: unn.DistributedFeatureConvTranspose1d(P, 1, 1, 2, padding=4)(x), "< 1")


@pytest.mark.ranks(2)
def test_words_that_are_none_of_the_legal_ones():
    P = Partition([1, 1, 2])
    with pytest.raises(TypeError):
        unn.DistributedAvgPool1d(P, 2, dilation=2)
    refused(lambda: unn.DistributedMSELoss(P, "batchmean"), "'none', 'mean', 'sum'")
    refused(lambda: unn.DistributedKLDivLoss(P, "max"), "'none', 'mean', 'sum', 'batchmean'")
    refused(lambda: unn.DistributedPad(P, (1, 1), "mirror"), "'constant', 'reflect'")
    refused(
        lambda: unn.DistributedFeatureConv1d(P, 1, 1, 3, padding_mode="mirror"),
        "'zeros', 'reflect', 'replicate', 'circular'",
    )
    refused(
        lambda: unn.DistributedFeatureConv1d(P, 1, 1, 3, weights="rank 0"), "replicated", "root"
    )
    refused(lambda: unn.DistributedFeatureConv1d(P, 1, 1, 3, padding="full"), "same", "valid")
    refused(lambda: unn.DistributedFeatureConv1d(P, 1, 1, 3, 2, "same"), "2 != 1")
    refused(lambda: unn.DistributedFeatureConv1d(P, 3, 4, 3, groups=2), "3 / 2 = 1.5")
    for how in (
        {"mode": "cubist", "size": 3}, {"mode": "bilinear", "size": 3}, {"size": (3, 4)},
        {"size": 3, "align_corners": True}, {}, {"size": 3, "scale_factor": 2.0},
    ):  # fmt: skip
        refused(lambda h=how: unn.DistributedUpsample(P, **h), "1 spatial dims")
    refused(lambda: unn.DistributedEmbedding(P, 3, 3, split="rows"), "'dim', 'vocab'")
    refused(lambda: unn.DistributedEmbedding(P, 4, 3, padding_idx=4), "padding_idx")
    refused(lambda: unn.DistributedPad(P, (1, 1, 1)), "3 numbers")
    refused(lambda: unn.DistributedLinearAllGather(P, 0, 3), "< 1")
    image = Partition([1, 1, 2, 1])
    refused(lambda: unn.DistributedAvgPool2d(image, 2, divisor_override=0), "divisor_override")
    refused(lambda: unn.structure_check("sometimes"), "'always', 'off'")
    refused(lambda: unn.state_dict_mode("some").__enter__(), "'full', 'sharded'")


@pytest.mark.ranks(2)
def test_numbers_that_the_whole_tensor_does_not_have():
    P, C = Partition([1, 1, 2]), Partition([1, 2, 1])
    refused(lambda: unn.DistributedBatchNorm(P, 3)(ones(1, 3, 0)), "[1, 3, 0]", "0 <= 3")
    alone = Partition([2, 1])
    x = ones(1, 3) if unisono.world().rank == 0 else ones(0, 3)
    refused(lambda: unn.DistributedBatchNorm(alone, 3)(x), "3 <= 3", "[1, 3]")
    refused(lambda: unn.DistributedBatchNorm(C, 5)(ones(1, 2, 3)), "[1, 4, 3]", "[4] != [5]")
    refused(
        lambda: unn.DistributedFeatureConv1d(P, 3, 1, 3)(ones(1, 2, 4)),
        "[1, 2, 8]",
        "[2] != [3]",
    )
    channel = unn.DistributedChannelConv1d(C, Partition([1, 1, 1]), C, 3, 2, 3)
    refused(lambda: channel(ones(1, 2, 4)), "[4] != [3]")
    refused(
        lambda: unn.DistributedLinearAllGather(Partition([1, 2]), 5, 4)(ones(2, 3)),
        "[6] != [5]",
    )
    refused(
        lambda: unn.DistributedLinearReduceScatter(Partition([1, 2]), 5, 4)(ones(2, 3)),
        "[6] != [5]",
    )
    refused(lambda: unn.DistributedLayerNorm(P, 5)(ones(1, 2, 3)), "[6] != [5]")
    refused(lambda: unn.DistributedFeatureConvTranspose1d(P, 3, 1, 3)(ones(1, 2, 4)), "[2] != [3]")
    ids = torch.zeros(2 + unisono.world().rank, dtype=torch.long)
    refused(lambda: unn.DistributedEmbedding(Partition([1, 2]), 5, 4)(ids), "rank 1: ids [3]")
    refused(
        lambda: unn.DistributedCrossEntropyLoss(P)(ones(1, 2, 3), torch.zeros(1, 2, 3).long()),
        "[1, 3] != [1, 2, 3]",
    )

"""Split embedding tables and upsampling against torch's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import PartitionError
from unisono.nn.layers.embedding import DistributedEmbedding
from unisono.nn.layers.upsampling import DistributedUpsample, Interpolate
from unisono.topology import Partition

IDS = torch.tensor([[0, 5, 2, 2], [6, 1, 0, 3], [3, 3, 3, 6]])


@pytest.mark.ranks([1, 2, 3])
def test_rows_are_scaled_down_to_any_norm():
    size = unisono.world().size
    for split, columns in product(("dim", "vocab"), (5, 2)):  # 2: a rank may hold none
        for order in (torch.inf, -torch.inf, 0.0, 1.0, 3.0):
            P = Partition([1, 1, size])
            largest = 0.1 if order < 0 else 0.5
            options = {"max_norm": largest, "norm_type": order, "dtype": torch.float64}
            torch.manual_seed(2)
            plain = nn.Embedding(7, columns, **options)
            torch.manual_seed(2)
            layer = DistributedEmbedding(P, 7, columns, **options, split=split)
            y, z = layer(IDS), plain(IDS)
            here = P.local_slices(z.shape) if split == "dim" else ()
            torch.testing.assert_close(y, z[here])
            torch.testing.assert_close(layer.state_dict()["weight"], plain.weight.detach())


@pytest.mark.ranks(2)
def test_a_rank_outside_gets_no_vectors_for_its_batch():
    P = Partition([1, 1, 1])
    layer = DistributedEmbedding(P, 7, 5, dtype=torch.float64)
    for ids in (torch.empty(3, 0, dtype=torch.long), torch.empty(0, dtype=torch.long), IDS):
        y = layer(IDS if P.active else ids)
        assert y.dtype == torch.float64
        if not P.active:
            assert tuple(y.shape) == (tuple(ids.shape) if ids.numel() == 0 else (3, 0))
        y.sum().backward()


@pytest.mark.ranks(2)
def test_an_id_outside_of_the_table_on_one_rank_is_refused_on_all():
    for shape, split in (([2, 1], "dim"), ([1, 2], "vocab")):
        P = Partition(shape)
        layer = DistributedEmbedding(P, 4, 6, split=split)
        first = P.rank == 0 or split == "vocab"  # with rows split, all hold the same ids
        for bad in (4, -1):
            ids = torch.tensor([1, bad if first else 2])
            with pytest.raises(PartitionError, match=rf"not 0 <= {bad} < 4"):
                layer(ids)
        with pytest.raises(PartitionError, match="long"):
            layer(torch.ones(2))
        assert layer(torch.tensor([1, 2])).shape == (2, 6)


@pytest.mark.ranks(2)
def test_integers_are_copied_but_not_weighed():
    P, space = Partition([1, 1, 2]), Partition([1, 1, 2, 1])
    x = torch.arange(250, 256, dtype=torch.uint8).reshape(1, 1, 6)
    y = DistributedUpsample(P, scale_factor=2)(x[P.local_slices(x.shape)])
    z = nn.Upsample(scale_factor=2)(x)
    assert torch.equal(y, z[P.local_slices(z.shape)])
    said = r"torch.uint8[\s\S]*integers have no weighted sums[\s\S]*x.float\(\)"
    with pytest.raises(PartitionError, match=said):
        DistributedUpsample(P, scale_factor=2, mode="linear")(x[P.local_slices(x.shape)])
    with pytest.raises(PartitionError, match=said):
        DistributedUpsample(space, scale_factor=2, mode="bicubic")(torch.ones_like(x)[None])
    ends = ([0, 0, 0], [1, 1, 6], [1, 1, 6], [0, 0, 0], [1, 1, 12], [1, 1, 12])
    assert torch.equal(Interpolate(*ends)(x), z)
    with pytest.raises(PartitionError, match=said):
        Interpolate(*ends, mode="linear")(x)


def test_interpolate_is_the_local_part():
    x = torch.randn(1, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = nn.Upsample(size=12, mode="linear")(x)
    whole = ([0, 0, 0], [1, 1, 6], [1, 1, 6])
    out = Interpolate(*whole, [0, 0, 4], [1, 1, 9], [1, 1, 12], mode="linear")(x)
    torch.testing.assert_close(out, z[:, :, 4:9])
    with pytest.raises(PartitionError, match="needs point"):
        Interpolate([0, 0, 3], [1, 1, 6], [1, 1, 6], [0, 0, 0], [1, 1, 9], [1, 1, 12])

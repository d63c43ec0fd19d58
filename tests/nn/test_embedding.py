"""Embedding tables split in rows and columns, against torch's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.drawing import RANKS, quick
from torch import nn

import unisono
import unisono.nn as unn
from unisono.errors import PartitionError
from unisono.nn.layers.embedding import DistributedEmbedding
from unisono.topology import Partition


@pytest.mark.ranks(RANKS)
@quick
@given(
    table=st.tuples(st.integers(1, 9), st.integers(1, 6)),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    split=st.sampled_from(["dim", "vocab"]),
    batched=st.booleans(),
    padding=st.sampled_from([None, 0, -1]),
    max_norm=st.sampled_from([None, 0.9]),
    by_frequency=st.booleans(),
    weights=st.sampled_from(["replicated", "root"]),
)
def test_embeddings_equal_torch(
    table, shape, split, batched, padding, max_norm, by_frequency, weights, proof
):
    size = unisono.world().size
    P = Partition([size if batched else 1, *[1] * (len(shape) - 1), 1 if batched else size])
    options = {
        "padding_idx": padding, "max_norm": max_norm, "scale_grad_by_freq": by_frequency,
        "dtype": torch.float64,
    }  # fmt: skip
    ours, theirs = proof.pair(
        lambda: unn.DistributedEmbedding(P, *table, **options, split=split, weights=weights),
        lambda: nn.Embedding(*table, **options),
    )
    ids = torch.randint(table[0], shape, generator=torch.Generator().manual_seed(3))
    where = P.local_slices((*shape, table[1]))
    y, z = ours(ids[where[:-1]]), theirs(ids)
    there = where if split == "dim" else where[:-1]
    torch.testing.assert_close(y, z[there])
    weights = proof.ramp(z)
    proof.score(y, weights[there]).backward()
    proof.score(z, weights).backward()
    held = ours._holdings["weight"].slices
    grad = torch.zeros_like(ours.weight) if ours.weight.grad is None else ours.weight.grad
    torch.testing.assert_close(grad, theirs.weight.grad[held])
    torch.testing.assert_close(ours.weight, theirs.weight[held])  # rows scaled by max_norm
    if weights == "root" and P.index[0] > 0:  # the first of those who split the ids holds it
        assert ours.weight.numel() == 0


IDS = torch.tensor([[0, 5, 2, 2], [6, 1, 0, 3], [3, 3, 3, 6]])


@pytest.mark.ranks([1, 2, 3])
def test_rows_are_scaled_down_to_a_norm():
    size = unisono.world().size
    for split, columns in product(("dim", "vocab"), (5, 2)):  # 2: a rank may hold none
        for order in (torch.inf, 1.0, 3.0):
            P = Partition([1, 1, size])
            options = {"max_norm": 0.5, "norm_type": order, "dtype": torch.float64}
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

"""One random order over all ranks, the same as the formula on the whole array."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.repeated import repeated

from unisono.comm import world
from unisono.data_parallel import (
    DistributedDataset,
    DistributedSampler,
    create_train_val_split,
    shard,
)
from unisono.errors import PartitionError


def permutation(n: int, seed: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def whole(dataset: DistributedDataset) -> torch.Tensor:
    return world().all_gather(dataset.data)


@pytest.mark.ranks([1, 2, 3, 4], timeout=60)
@repeated("n", [1, 3, 17])
def test_the_global_order_is_that_of_the_formula(n, rank_count):
    x = torch.arange(2.0 * n).reshape(n, 2)
    mine = shard(x).clone()
    before = mine.clone()
    state = torch.get_rng_state()
    data = DistributedDataset(mine)
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    assert torch.equal(whole(data), x[permutation(n, 5)])
    sampler.set_epoch(3)
    assert torch.equal(whole(data), x[permutation(n, 8)])
    sampler.set_seed(11)
    assert torch.equal(whole(data), x[permutation(n, 11)])
    assert list(sampler) == list(range(len(data)))
    assert len(sampler) == len(data) == len(mine)
    assert torch.equal(mine, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.ranks(3, timeout=60)
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(0, 6), min_size=3, max_size=3), seed=st.integers(0, 1000))
def test_any_split_of_the_rows_gives_the_formula(sizes, seed):
    n = sum(sizes)
    x = torch.arange(n)
    data = DistributedDataset(x.split(sizes)[world().rank])
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    assert torch.equal(whole(data), x[permutation(n, seed)])
    sampler.set_epoch(1)
    assert torch.equal(whole(data), x[permutation(n, seed + 1)])


@pytest.mark.ranks([1, 2, 3], timeout=60)
def test_a_local_order_keeps_rows_on_their_rank_and_does_not_depend_on_the_past(rank_count):
    x = torch.arange(14)
    mine = shard(x)
    data = DistributedDataset(mine)
    sampler = DistributedSampler(data, True, seed=2, shuffle_type="local")
    assert torch.equal(data.data, mine[permutation(len(mine), 2)])
    sampler.set_epoch(1)
    sampler.set_epoch(4)
    assert torch.equal(data.data, mine[permutation(len(mine), 6)])
    sampler.set_shuffle_type("global")
    sampler.set_epoch(0)
    assert torch.equal(whole(data), x[permutation(14, 2)])


@pytest.mark.ranks(2, timeout=60)
def test_a_seed_that_is_not_given_is_the_same_on_all_ranks():
    data = DistributedDataset(shard(torch.arange(20)))
    sampler = DistributedSampler(data, shuffle=True)
    assert world().all_equal(sampler.seed)
    assert sorted(whole(data).tolist()) == list(range(20))


@pytest.mark.ranks([1, 2], timeout=60)
def test_a_linked_sampler_keeps_labels_beside_their_rows(rank_count):
    x = torch.arange(13)
    rows, labels = DistributedDataset(shard(x)), DistributedDataset(shard(x * 10))
    first = DistributedSampler(rows, shuffle=True, seed=3)
    second = DistributedSampler(labels)
    first.link(second)
    assert torch.equal(labels.data, rows.data * 10)
    first.set_epoch(2)
    assert torch.equal(labels.data, rows.data * 10)
    first.set_shuffle_type("local")
    first.set_seed(8)
    assert torch.equal(labels.data, rows.data * 10)
    first.unlink()
    first.set_seed(9)
    assert not torch.equal(labels.data, rows.data * 10)


@pytest.mark.ranks(2, timeout=60)
def test_without_shuffle_rows_stay():
    mine = shard(torch.arange(8))
    data = DistributedDataset(mine, transforms=lambda row: row + 1)
    sampler = DistributedSampler(data)
    sampler.set_epoch(3)
    assert [data[i].item() for i in sampler] == (mine + 1).tolist()


@pytest.mark.ranks([1, 2, 3], timeout=60)
def test_a_split_keeps_pairs_together_and_shows_every_row_once(rank_count):
    x = torch.arange(40.0).reshape(20, 2)
    y = x[:, 0] * 3
    mine, labels = shard(x), shard(y).numpy()
    before = mine.clone()
    parts = create_train_val_split(mine, labels, p=0.7, seed=1)
    x_train, y_train, x_val, y_val = parts
    assert len(x_train) == int(0.7 * len(mine))
    assert len(x_train) + len(x_val) == len(mine)
    assert torch.equal(y_train, x_train[:, 0] * 3)
    assert torch.equal(y_val, x_val[:, 0] * 3)
    seen = world().all_gather(torch.cat([x_train, x_val]))
    assert sorted(seen[:, 0].tolist()) == x[:, 0].tolist()
    assert torch.equal(mine, before)
    again = create_train_val_split(mine, labels, p=0.7, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    drawn = create_train_val_split(mine, labels)
    assert torch.equal(drawn[1], drawn[0][:, 0] * 3)


@pytest.mark.ranks(2, timeout=60)
def test_rows_without_a_label_are_refused_on_all_ranks():
    n = 3 if world().rank else 4
    with pytest.raises(ValueError, match="rank 1 X has 4 rows and y has 3"):
        create_train_val_split(torch.ones(4), torch.ones(n))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda data: DistributedDataset([1, 2]), TypeError),
        (lambda data: DistributedSampler(torch.ones(3)), TypeError),
        (lambda data: DistributedSampler(data, shuffle=1), TypeError),
        (lambda data: DistributedSampler(data, seed="1"), TypeError),
        (lambda data: DistributedSampler(data, shuffle_type="ring"), ValueError),
        (lambda data: DistributedSampler(data).link("sampler"), TypeError),
        (lambda data: DistributedSampler(data).set_shuffle_type("ring"), ValueError),
        (lambda data: create_train_val_split(torch.ones(3), torch.ones(3), p=1.0), ValueError),
        (lambda data: create_train_val_split("x", torch.ones(3)), TypeError),
    ],
)
def test_bad_arguments_are_refused(make, error):
    with pytest.raises(error):
        make(DistributedDataset(torch.ones(3)))


def test_samplers_of_unlike_arrays_cannot_be_linked():
    short = DistributedSampler(DistributedDataset(torch.ones(2)))
    with pytest.raises(PartitionError, match="split both arrays alike"):
        DistributedSampler(DistributedDataset(torch.ones(3))).link(short)

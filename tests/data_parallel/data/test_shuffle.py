"""Rows that move in a ring: none lost, none doubled, attributes in step, inputs untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.repeated import repeated

from unisono.comm import world
from unisono.data_parallel import (
    DataLoader,
    Dataset,
    dataset_irecv,
    dataset_ishuffle,
    dataset_shuffle,
    shard,
)
from unisono.errors import PartitionError

N = 7


def own_rows(extra: int = 0) -> torch.Tensor:
    """Rows that name their rank and place; rank 0 has `extra` more than the others."""
    rank = world().rank
    n = N + (extra if rank == 0 else 0)
    return torch.arange(n * 2).reshape(n, 2) + 100 * rank


class Labelled(Dataset):
    def __init__(self, rows, **options):
        super().__init__(rows, **options)
        self.targets = self.data[:, 0] * 10

    def __getitem__(self, index):
        return self.data[index], self.targets[index]


def everybody(rows: torch.Tensor) -> list[int]:
    return sorted(world().all_gather(rows).flatten().tolist())


@pytest.mark.ranks([1, 2, 3, 4], timeout=60)
def test_five_shuffles_keep_every_row_and_its_label(rank_count):
    mine = own_rows()
    before = mine.clone()
    state = torch.get_rng_state()
    data = Labelled(mine, seed=3)
    all_rows = everybody(data.data)
    seen = []
    for _ in range(5):
        data.Shuffle()
        assert everybody(data.data) == all_rows
        assert torch.equal(data.targets, data.data[:, 0] * 10)
        seen.append(data.data.clone())
    assert torch.equal(mine, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not all(torch.equal(a, seen[0]) for a in seen[1:])
    if rank_count > 1:
        assert not set(seen[-1].flatten().tolist()) <= set(before.flatten().tolist())


@pytest.mark.ranks([1, 2, 3], timeout=60)
def test_half_of_the_rows_come_from_the_previous_rank(rank_count):
    data = Dataset(own_rows())
    assert data.lcl_half == 3
    data.Shuffle()
    rank, previous = world().rank, (world().rank - 1) % rank_count
    arrived = torch.arange(6) + 100 * previous
    kept = torch.arange(6, 14) + 100 * rank
    expected = sorted([*arrived.tolist(), *kept.tolist()])
    assert sorted(data.data.flatten().tolist()) == expected


@pytest.mark.ranks(2, timeout=60, backend=["gloo", "shm"])
def test_a_background_shuffle_equals_a_shuffle_and_changes_rows_only_when_received():
    at_once, later = Labelled(own_rows(), seed=5), Labelled(own_rows(), seed=5)
    for _ in range(3):
        at_once.Shuffle()
        before = later.data
        later.Ishuffle()
        assert later.data is before
        world().all_reduce(torch.ones(3))
        dataset_irecv(later)
        assert torch.equal(later.data, at_once.data)
        assert torch.equal(later.targets, at_once.targets)
    dataset_irecv(later)
    assert torch.equal(later.data, at_once.data)


@pytest.mark.ranks(2, timeout=60)
def test_starting_twice_receives_the_first_exchange_before_the_second():
    data, twin = Dataset(own_rows(), seed=1), Dataset(own_rows(), seed=1)
    data.Ishuffle()
    data.Ishuffle()
    dataset_irecv(data)
    twin.Shuffle()
    twin.Shuffle()
    assert torch.equal(data.data, twin.data)


@pytest.mark.ranks([2, 3], timeout=60)
def test_unequal_shards_are_cut_to_the_shortest(rank_count):
    data = Labelled(own_rows(extra=4))
    assert len(data) == N
    data.Shuffle()
    assert data.data.shape == (N, 2)
    assert torch.equal(data.targets, data.data[:, 0] * 10)


@pytest.mark.ranks(2, timeout=60)
def test_another_object_follows_the_shuffled_tensor():
    class Held:
        def __init__(self, larray):
            self.larray = larray
            self.comm = world()
            self.split = 0

    held = Held(own_rows())
    rows = held.larray
    data = Dataset(held)
    assert data.htdata is held
    dataset_shuffle(data, [["data", "htdata"]])
    assert held.larray is data.data
    assert torch.equal(rows, own_rows())
    dataset_ishuffle(data, [["data", None]])
    dataset_irecv(data)
    assert held.larray is not data.data


@pytest.mark.ranks(2, timeout=60)
def test_two_runs_with_one_seed_give_the_same_rows_and_another_seed_others():
    runs = []
    for seed in (4, 4, 5):
        data = Dataset(own_rows(), seed=seed)
        data.Shuffle()
        runs.append(data.data)
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.ranks(2, timeout=60)
@repeated("ishuffle", [False, True])
def test_the_loader_shows_every_row_in_each_epoch_and_shuffles_between(ishuffle):
    data = Labelled(own_rows(), ishuffle=ishuffle)
    loader = DataLoader(data, batch_size=3)
    all_rows = everybody(data.data)
    state = torch.get_rng_state()
    own_first = data.data.clone()
    for epoch in range(4):
        loader.last_epoch = epoch == 3
        batches = list(loader)
        assert len(batches) == len(loader) == 3
        rows = torch.cat([x for x, _ in batches])
        assert torch.equal(torch.cat([t for _, t in batches]), rows[:, 0] * 10)
        assert everybody(rows) == all_rows
        if epoch == 0:
            assert sorted(rows.flatten().tolist()) == sorted(own_first.flatten().tolist())
    assert data.shuffles == 3
    assert data.exchange is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.ranks(2, timeout=60)
def test_a_test_set_is_read_in_order_and_never_shuffled():
    data = Dataset(own_rows(), test_set=True)
    loader = DataLoader(data, batch_size=N)
    for _ in range(3):
        (batch,) = loader
        assert torch.equal(batch, own_rows())


def test_transforms_are_applied_in_order():
    data = Dataset(torch.arange(3.0), transforms=[lambda row: row + 1, lambda row: row * 10])
    assert [data[i].item() for i in range(3)] == [10.0, 20.0, 30.0]


@pytest.mark.ranks([1, 3], timeout=60)
def test_shards_make_up_the_whole(rank_count):
    x = torch.arange(14).reshape(2, 7)
    assert torch.equal(world().all_gather(shard(x, axis=1), dim=1), x)
    assert isinstance(shard(x.numpy()), np.ndarray)


def test_bad_arrays_are_refused():
    class Split:
        larray = torch.ones(3)
        split = 1

    with pytest.raises(ValueError, match="split=1"):
        Dataset(Split())
    with pytest.raises(TypeError, match="not an array"):
        Dataset("rows")
    with pytest.raises(TypeError, match="transforms"):
        Dataset(torch.ones(3), transforms=3)
    with pytest.raises(TypeError, match="names no group"):
        Dataset(torch.ones(3), comm="world")
    with pytest.raises(TypeError, match=r"HINT: DataLoader\(Dataset"):
        DataLoader([1, 2, 3])
    with pytest.raises(PartitionError, match="axis=2"):
        shard(torch.ones(3), axis=2)


def test_a_misaligned_attribute_is_refused():
    data = Dataset(torch.ones(4, 1))
    data.targets = torch.ones(3)
    with pytest.raises(PartitionError, match="at least 4 rows"):
        data.Shuffle()


class Own(torch.utils.data.Dataset):
    """A dataset written for HeAT, with what its documentation asks for and nothing else."""

    def __init__(self, rows, ishuffle):
        self.comm = world()
        self.htdata = rows
        self._cut_slice = slice(0, N)
        self.lcl_half = N // 2
        self.data = rows[self._cut_slice]
        self.ishuffle = ishuffle
        self.test_set = False

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return len(self.data)

    def Shuffle(self):
        dataset_shuffle(self, attrs=[["data", None]])

    def Ishuffle(self):
        dataset_ishuffle(self, attrs=[["data", None]])


@pytest.mark.ranks(2, timeout=60)
@repeated("ishuffle", [True, False])
def test_a_dataset_written_for_heat_is_shuffled(ishuffle):
    data, ours = Own(own_rows(), ishuffle), Dataset(own_rows(), ishuffle=ishuffle)
    before = everybody(data.data)
    loaders = [DataLoader(one, batch_size=N, shuffle=False) for one in (data, ours)]
    for _ in range(3):
        (rows,), (same,) = loaders
        assert torch.equal(rows, same)  # as a dataset of ours with seed 0
        assert everybody(rows) == before
    assert not torch.equal(rows, own_rows())
    dataset_irecv(data)
    dataset_irecv(ours)

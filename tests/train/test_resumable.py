"""A loader that is interrupted yields what it had not yet yielded, in the same order."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from unisono.comm import world
from unisono.data_parallel import DataLoader as RankLoader
from unisono.data_parallel import Dataset
from unisono.data_parallel import DistributedDataset as RankDataset
from unisono.data_parallel import DistributedSampler as RankSampler
from unisono.errors import CheckpointError
from unisono.train import Checkpoint, Resumable

ROWS = 13


def shuffled(seed):
    torch.manual_seed(seed)
    return DataLoader(torch.arange(ROWS), batch_size=3, shuffle=True)


def with_generator(seed):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(torch.arange(ROWS), batch_size=3, shuffle=True, generator=generator)


def with_sampler(seed):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        torch.arange(ROWS), 3, sampler=RandomSampler(range(ROWS), generator=generator)
    )


def with_batch_sampler(seed):
    generator = torch.Generator().manual_seed(seed)
    sampler = WeightedRandomSampler(torch.ones(ROWS), ROWS, generator=generator)
    return DataLoader(torch.arange(ROWS), batch_sampler=BatchSampler(sampler, 3, drop_last=False))


def with_two_generators(seed):
    torch.manual_seed(seed)  # the sampler draws from this one, and only the loader from the other
    own = torch.Generator().manual_seed(seed)
    return DataLoader(torch.arange(ROWS), 3, sampler=RandomSampler(range(ROWS)), generator=own)


def one_by_one(seed):
    torch.manual_seed(seed)
    return DataLoader(torch.arange(ROWS), batch_size=None, shuffle=True)


MAKERS = [
    *(shuffled, with_generator, with_sampler, with_batch_sampler, with_two_generators, one_by_one)
]


def two_epochs_and_a_half(loader, epochs=2):
    """Return all rows, and the state after the second batch of the epoch after these."""
    rows = []
    for _ in range(epochs):
        rows += [batch.tolist() for batch in loader]
    for number, batch in enumerate(loader):
        rows.append(batch.tolist())
        if number == 1:
            state = {**loader.state_dict()}
            random = torch.get_rng_state()
    return rows, state, random


@pytest.mark.parametrize("make", MAKERS)
def test_what_is_left_of_an_epoch_comes_in_its_order(make):
    first = Resumable(make(1))
    rows, state, random = two_epochs_and_a_half(first)
    following = [batch.tolist() for batch in first]
    second = Resumable(make(2))
    torch.set_rng_state(random)
    second.load_state_dict(state)
    assert second.epoch == 2
    assert second.batch == 2
    assert [batch.tolist() for batch in second] == rows[2 - len(second) :]
    assert second.epoch == 3
    assert [batch.tolist() for batch in second] == following


@pytest.mark.parametrize("epochs", [0, 2])
def test_what_is_left_is_right_with_workers_that_stay(epochs):
    def make(seed):
        torch.manual_seed(seed)
        return DataLoader(
            torch.arange(ROWS), 3, shuffle=True, num_workers=1, persistent_workers=True
        )

    rows, state, _ = two_epochs_and_a_half(Resumable(make(1)), epochs)
    second = Resumable(make(2))
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == rows[-3:]


def test_batches_that_were_used_are_not_loaded_again():
    class Counting(TensorDataset):
        loaded = 0

        def __getitem__(self, index):
            Counting.loaded += 1
            return super().__getitem__(index)

    rows = Counting(torch.arange(10))
    loader = Resumable(DataLoader(rows, batch_size=2))
    order = torch.get_rng_state()
    loader.load_state_dict({"epoch": 0, "samples": 8, "order": order, "generator": None})
    assert len(list(loader)) == 1
    assert Counting.loaded == 2


def test_an_epoch_that_was_saved_after_its_last_batch_yields_nothing_more():
    loader = Resumable(DataLoader(torch.arange(4), batch_size=2))
    states = [loader.state_dict() for _ in loader]
    again = Resumable(DataLoader(torch.arange(4), batch_size=2))
    again.load_state_dict(states[-1])
    assert list(again) == []
    assert again.epoch == 1
    assert len(list(again)) == 2


def test_a_stream_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    for wrong in (DataLoader(Stream()), [1, 2]):
        with pytest.raises(CheckpointError, match="not a loader"):
            Resumable(wrong)


def read_some(directory):
    comm = world()
    loader = loader_of_torch(comm)
    list(loader)  # epoch 0
    seen = []
    for batch in loader:
        seen += comm.all_gather(batch).tolist()
        if loader.batch == 2:
            Checkpoint(directory).save(1, loader=loader)
            return seen
    return seen


def read_rest(directory):
    comm = world()
    loader = loader_of_torch(comm)
    Checkpoint(directory).restore(loader=loader)
    return [row for batch in loader for row in comm.all_gather(batch).tolist()]


def loader_of_torch(comm):
    rows = torch.arange(48)
    sampler = DistributedSampler(rows, comm.size, comm.rank, seed=3)
    return Resumable(DataLoader(rows, 12 // comm.size, sampler=sampler))


def test_torchs_sampler_goes_on_with_the_same_samples_on_other_ranks(rank_pool, tmp_path):
    first = rank_pool.run(read_some, tmp_path, world=2)[0]
    for ranks in (1, 3):
        rest = rank_pool.run(read_rest, tmp_path, world=ranks)[0]
        assert sorted(first + rest) == list(range(48))


def test_workers_that_stay_read_the_shuffled_rows():
    data = Dataset(torch.arange(32), seed=1)
    loader = RankLoader(data, 32, num_workers=1, shuffle=False, persistent_workers=True)
    resumable = Resumable(loader)
    for _ in range(3):
        (rows,) = resumable
        assert torch.equal(rows, data.data)
    assert not torch.equal(data.data, torch.arange(32))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["ring", "background", "sampler", "sampler with a drawn seed"])
@pytest.mark.parametrize("epochs", [2, 0])
def test_rows_that_move_between_ranks_are_where_they_were(kind, epochs):
    rows = torch.arange(12) + 100 * world().rank

    def make():
        if "sampler" in kind:
            data = RankDataset(rows)
            sampler = RankSampler(data, shuffle=True, seed=5 if kind == "sampler" else None)
            return Resumable(RankLoader(data, 3, sampler=sampler))
        return Resumable(RankLoader(Dataset(rows, ishuffle=kind == "background"), 3))

    first = make()
    expected, state, _ = two_epochs_and_a_half(first, epochs)
    left = make()
    for _ in range(epochs):
        list(left)
    begun = [next(iter(left)).tolist()]  # a loop that was left goes on where it was
    begun += [batch.tolist() for batch in left]
    assert len(begun) == 4
    assert kind == "sampler with a drawn seed" or begun == expected[-4:]
    second = make()
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == expected[-2:]
    assert [b.tolist() for b in second] == [b.tolist() for b in first]


class PositionOfOneRank(DataLoader):
    """A loader that keeps its own position, as torchdata's `StatefulDataLoader` does."""

    yielded = 0

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.yielded = state["yielded"]


def save_position(directory):
    loader = PositionOfOneRank(torch.arange(4))
    loader.yielded = 2 + world().rank
    Checkpoint(directory).save(1, loader=loader)


def restored_position(directory):
    loader = PositionOfOneRank(torch.arange(4))
    Checkpoint(directory).restore(loader=loader)
    return loader.yielded


def test_the_position_of_one_rank_fits_only_as_many_ranks(rank_pool, tmp_path):
    rank_pool.run(save_position, tmp_path, world=2)
    assert rank_pool.run(restored_position, tmp_path, world=2) == [2, 3]
    with pytest.raises(CheckpointError, match="Resumable"):
        restored_position(tmp_path)

"""The loader with datasets that are not ours, samplers and workers."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DistributedSampler as TorchSampler
from torch.utils.data import IterableDataset, TensorDataset

from unisono.comm import world
from unisono.data_parallel import (
    DataLoader,
    Dataset,
    DistributedDataset,
    DistributedSampler,
    dataset_irecv,
    shard,
)


def test_a_plain_dataset_is_iterated_as_it_is():
    data = TensorDataset(torch.arange(6))
    loader = DataLoader(data, batch_size=4, shuffle=False, drop_last=True)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3]]
    assert len(loader) == 1
    assert loader.DataLoader.dataset is data
    assert not loader.ishuffle


def test_the_order_of_a_plain_dataset_changes_by_epoch_without_the_global_generator():
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=20)
    state = torch.get_rng_state()
    epochs = [next(batch.tolist() for (batch,) in loader) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_iterable_dataset_is_not_shuffled():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    assert [batch.tolist() for batch in DataLoader(Stream(), batch_size=2)] == [[0, 1], [2, 3]]


def test_an_object_with_a_local_array_becomes_a_dataset():
    class Held:
        larray = torch.arange(3)

    loader = DataLoader(Held(), shuffle=False)
    assert isinstance(loader.dataset, Dataset)
    assert [batch.item() for batch in loader] == [0, 1, 2]


@pytest.mark.ranks(2, timeout=60)
def test_a_sampler_moves_to_the_next_epoch_by_itself():
    data = TensorDataset(torch.arange(12))
    ours = DataLoader(data, sampler=TorchSampler(data, seed=7))
    epochs = [[x.item() for (x,) in ours] for _ in range(3)]
    by_hand = TorchSampler(data, seed=7)
    for epoch, rows in enumerate(epochs):
        by_hand.set_epoch(epoch)
        assert rows == list(by_hand)
    assert epochs[0] != epochs[1]


@pytest.mark.ranks([1, 2, 3], timeout=60)
def test_our_sampler_shuffles_over_ranks_in_each_epoch(rank_count):
    x = torch.arange(11)
    data = DistributedDataset(shard(x))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, True, seed=9))
    for epoch in range(3):
        rows = torch.cat(list(loader))
        q = torch.randperm(11, generator=torch.Generator().manual_seed(9 + epoch))
        assert torch.equal(world().all_gather(rows), x[q])


def test_workers_read_the_shuffled_rows():
    data = Dataset(torch.arange(8), seed=1)
    loader = DataLoader(data, batch_size=4, num_workers=1)
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))


def test_workers_that_stay_read_the_shuffled_rows():
    data = Dataset(torch.arange(32), seed=1)
    loader = DataLoader(data, 32, num_workers=1, shuffle=False, persistent_workers=True)
    for _ in range(3):
        (rows,) = loader
        assert torch.equal(rows, data.data)
    assert not torch.equal(data.data, torch.arange(32))
    data = DistributedDataset(torch.arange(32))
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, 32, num_workers=1, sampler=sampler, persistent_workers=True)
    for _ in range(3):
        (rows,) = loader
        assert torch.equal(rows, data.data)
    # Nothing has changed for a test set: the worker stays.
    loader = DataLoader(
        Dataset(torch.arange(4), test_set=True), 4, num_workers=1, persistent_workers=True
    )
    list(loader)
    first = loader.DataLoader._iterator
    list(loader)
    assert loader.DataLoader._iterator is first


@pytest.mark.ranks(2, timeout=60)
def test_a_dataset_travels_to_a_worker_without_its_communicator():
    ring, sampled = Dataset(shard(torch.arange(8))), DistributedDataset(shard(torch.arange(8)))
    ring.Ishuffle()
    for data in (ring, sampled):
        copy = pickle.loads(pickle.dumps(data))
        assert copy.comm is None
        assert [copy[i].item() for i in range(4)] == [data[i].item() for i in range(4)]
    dataset_irecv(ring)

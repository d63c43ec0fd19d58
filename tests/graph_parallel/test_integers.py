"""Lists of integers: sorted, marked and digested as plain torch would, also within torch.func."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.graph_parallel import GraphPartition, integers
from unisono.graph_parallel.integers import digest, distinct, marked, smallest_dtype, stable_order

NUMBERS = st.lists(st.integers(0, 20), max_size=60)


def inside_a_transform(function, *arguments):
    """Return what a function gives within `torch.func`, where numpy sees no tensor."""
    found = []

    def plain(x):
        found.append(function(*arguments))
        return x.sum(), found[-1]

    _, out = torch.func.grad(plain, has_aux=True)(torch.ones(1))
    assert found
    return out


@settings(deadline=None, max_examples=40)
@given(numbers=NUMBERS, dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]))
def test_numpy_and_torch_agree(numbers, dtype):
    keys = torch.tensor(numbers, dtype=dtype)
    order = keys.sort(stable=True).indices
    for below in (21, 1 << 62):  # the second is too wide to be packed
        assert torch.equal(stable_order(keys, below), order)
    places = (keys > 9).nonzero()[:, 0]
    assert torch.equal(marked(keys > 9), places)
    assert torch.equal(distinct(keys.clone()), torch.unique(keys))
    for function, arguments, wanted in (
        (stable_order, (keys, 21), order),
        (marked, (keys > 9,), places),
        (distinct, (keys,), torch.unique(keys)),
    ):
        assert torch.equal(inside_a_transform(function, *arguments), wanted)


def test_the_smallest_dtype_holds_the_largest_number():
    for bits in (8, 15, 31, 40):
        below = 1 << bits
        assert torch.tensor([below - 1]).to(smallest_dtype(below)).item() == below - 1
        wider = torch.tensor([below]).to(smallest_dtype(below + 1))
        assert wider.item() == below


def test_a_digest_sees_one_number_two_that_swap_and_whole_chunks_that_do():
    long = torch.arange(2**16 + 5).repeat(2).view(2, -1)
    told = {digest(long)}
    assert digest(long) in told
    chunk = 1 << 15
    for change in (
        lambda x: x[1].__setitem__(-1, 0),
        lambda x: x[0].__setitem__(7, x[0, 7] + 2**40),
        lambda x: x.__setitem__((0, slice(0, 2)), x[0, :2].flip(0)),
        lambda x: x.__setitem__((1, slice(0, 2 * chunk)), x[1, : 2 * chunk].roll(chunk)),
    ):
        other = long.clone()
        change(other)
        told.add(digest(other))
    told |= {digest(long.flip(0).contiguous() + torch.tensor([[0], [1]])), digest(long[0])}
    assert len(told) == 7
    assert digest(long.int()) == digest(long)
    assert digest(long[:, :0]) == 0


@pytest.mark.parametrize("table", [0, 10**9])
def test_rows_marked_in_a_table_are_those_of_a_sorted_list(monkeypatch, table):
    monkeypatch.setattr("unisono.graph_parallel.partition.TABLE", table)
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 90, (2, 400), generator=draw)
    owner = torch.randint(0, 300, (90,), generator=draw)  # more parts than a byte counts
    part = GraphPartition.from_owner(owner, 300)
    fetcher, place, cut = part.fetched(edges[0], part.owners_of(edges[1]))
    source, target = edges.tolist()
    pairs = {
        (int(owner[t]), int(part.inverse[s]))
        for s, t in zip(source, target, strict=True)
        if owner[s] != owner[t]
    }
    assert list(zip(fetcher.tolist(), place.tolist(), strict=True)) == sorted(pairs)
    assert cut == int((owner[edges[0]] != owner[edges[1]]).sum())


def test_a_list_longer_than_a_chunk_is_treated_like_a_short_one(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 50, (2, 300), generator=draw)
    part = GraphPartition.contiguous(50, 3)
    whole = part.fetched(edges[0], part.owners_of(edges[1]))
    assert integers.CHUNK > 300
    monkeypatch.setattr("unisono.graph_parallel.partition.CHUNK", 7)
    *rows, cut = part.fetched(edges[0], part.owners_of(edges[1]))
    *whole_rows, whole_cut = whole
    assert cut == whole_cut
    assert all(map(torch.equal, rows, whole_rows))

"""Balanced blocks: sizes, cuts, owners, numbering, and shapes that fit a number of ranks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.topology import decompose

lengths = st.integers(0, 200)
counts = st.integers(1, 17)


@given(n=lengths, parts=counts)
def test_balanced_sizes_add_up_and_differ_by_at_most_one(n: int, parts: int) -> None:
    sizes = decompose.split_sizes(n, parts)
    assert sum(sizes) == n
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)


@given(n=lengths, parts=counts)
def test_blocks_are_the_intervals_between_the_cuts(n: int, parts: int) -> None:
    cuts = decompose.split_cuts(n, parts)
    assert (cuts[0], cuts[-1]) == (0, n)
    blocks = [decompose.block(n, parts, i) for i in range(parts)]
    assert blocks == list(pairwise(cuts))


@given(n=lengths, parts=counts)
def test_every_point_lies_in_the_block_of_its_owner(n: int, parts: int) -> None:
    cuts = decompose.split_cuts(n, parts)
    for i in range(n):
        start, stop = decompose.block(n, parts, decompose.block_at(cuts, i))
        assert start <= i < stop


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_block_at_never_names_an_empty_block(sizes: list[int]) -> None:
    cuts = decompose.bounds(sizes)
    for i in range(cuts[-1]):
        at = decompose.block_at(cuts, i)
        assert cuts[at] <= i < cuts[at + 1]


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_row_major_numbers_and_coordinates_are_inverse(shape: list[int]) -> None:
    seen = [decompose.grid_index(shape, flat) for flat in range(math.prod(shape))]
    assert seen == sorted(seen)
    assert [decompose.flat_index(shape, index) for index in seen] == list(range(len(seen)))


@pytest.mark.parametrize(
    ("shape", "total", "fits"),
    [
        ((2, 3), 8, (2, 4)),
        ((1, 1, 3), 4, (1, 1, 4)),
        ((3, 3), 4, (2, 2)),
        ((5,), 7, (7,)),
        ((4, 2), 8, (4, 2)),
    ],
)
def test_the_fitting_shape_changes_as_little_as_it_can(
    shape: tuple[int, ...], total: int, fits: tuple[int, ...]
) -> None:
    assert decompose.fitting_shape(shape, total) == fits

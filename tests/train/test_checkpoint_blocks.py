"""Who can write what: each version is whole, and every rank gets back what it had."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.train.checkpoint.blocks import BlockFacts, compare


def block(place, content, *, of=6, size=3):
    return BlockFacts(((of,), torch.float32), (place,), (size,), 4 * size, content)


@given(
    contents=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), min_size=1, max_size=4),
    lacking=st.sets(st.integers(0, 7)),
)
def test_every_rank_finds_its_own_block_in_its_version(contents, lacking):
    # A mesh of replicas x 2 blocks; `contents` says what each replica has at each place.
    pieces = [
        {} if 2 * row + place in lacking else {"w": block(3 * place, replica[place])}
        for row, replica in enumerate(contents)
        for place in range(2)
    ]
    comparison = compare(pieces)
    versions = comparison.versions.get("w", [0] * len(pieces))
    stored = {}
    for rank, offers in enumerate(comparison.offers):
        for name, version in offers:
            mine = pieces[rank][name]
            assert stored.setdefault((version, mine.offsets), mine.digest) == mine.digest
    for rank, have in enumerate(pieces):
        if have:
            assert stored[versions[rank], have["w"].offsets] == have["w"].digest
    places = {have["w"].offsets for have in pieces if have}
    for version in {version for version, _ in stored}:
        assert {offsets for v, offsets in stored if v == version} == places, "a version is whole"

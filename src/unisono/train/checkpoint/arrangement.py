"""Who writes which piece of a checkpoint. Pure.

What all ranks hold alike is written once, by the rank with least to write. What they hold
differently (random states, running values, replicas of DASO between two exchanges) is written in
several versions, and the checkpoint notes which rank had which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Held:
    """What a rank holds under a name: a block of a tensor, or an object."""

    kind: tuple[Any, ...]
    """Shape and dtype of the whole tensor; empty for an object."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int
    digest: bytes
    """Equal for equal content."""


@dataclass(frozen=True)
class Arrangement:
    """The pieces of a checkpoint: who writes them, and which version each rank holds."""

    writes: list[list[tuple[str, int]]]
    """For each rank, names and versions of what it writes."""
    versions: dict[str, list[int]]
    """For names with several versions, that of each rank."""


def arrange(held: Sequence[Mapping[str, Held]]) -> Arrangement:
    """Return the arrangement for what each rank holds; the same answer wherever it is asked."""
    load = [0] * len(held)
    writes: list[list[tuple[str, int]]] = [[] for _ in held]
    versions: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for mine in held for name in mine):
        mine = {rank: have[name] for rank, have in enumerate(held) if name in have}
        of_rank, sources = _versions(mine)
        if len(sources) > 1:
            versions[name] = [of_rank.get(rank, 0) for rank in range(len(held))]
        for version, ranks in enumerate(sources):
            for source in ranks:
                able = [rank for rank, block in mine.items() if block == mine[source]]
                writer = min(able, key=lambda rank: (load[rank], rank))
                load[writer] += mine[source].bytes
                writes[writer].append((name, version))
    return Arrangement(writes, versions)


def _versions(mine: Mapping[int, Held]) -> tuple[dict[int, int], list[list[int]]]:
    """Return the version of each rank, and for each version the ranks whose blocks make it whole.

    The i-th holders of all blocks of a tensor belong together: on a mesh they are one replica.
    """
    of_rank: dict[int, int] = {}
    sources: list[list[int]] = []
    for kind in dict.fromkeys(block.kind for block in mine.values()):
        holders: dict[tuple[Any, ...], list[int]] = {}
        for rank, block in mine.items():
            if block.kind == kind:
                holders.setdefault((block.offsets, block.sizes), []).append(rank)
        known: dict[tuple[bytes, ...], int] = {}
        for i in range(max(map(len, holders.values()))):
            ranks = [row[min(i, len(row) - 1)] for row in holders.values()]
            content = tuple(mine[rank].digest for rank in ranks)
            if content not in known:
                known[content] = len(sources)
                sources.append(ranks)
            of_rank |= {row[i]: known[content] for row in holders.values() if i < len(row)}
    return of_rank, sources

"""Checks that end the same way on all ranks: each says what it found, then all raise or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.comm import Communicator
from unisono.errors import compress_ranks


def raise_together(title: str, found: Sequence[str], *, comm: Communicator) -> None:
    """Raise one `AssertionError` on every rank if any rank found something. Collective.

    Args:
        title: what was checked.
        found: what this rank found wrong; empty when all is well.
        comm: the ranks that take part.
    """
    __tracebackhide__ = True
    everybody: list[list[str]] = comm.all_gather_object(list(found))
    by_text: dict[str, list[int]] = {}
    for rank, texts in enumerate(everybody):
        for text in texts:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        raise AssertionError("\n".join([title, *_lines(by_text, comm.size)]))


def _lines(by_text: Mapping[str, Sequence[int]], size: int) -> list[str]:
    lines: list[str] = []
    for text, ranks in by_text.items():
        where = "all ranks" if len(ranks) == size else f"rank {compress_ranks(ranks)}"
        indented = text.strip().replace("\n", "\n    ")
        lines.append(f"  {where}: {indented}" if size > 1 else f"  {indented}")
    return lines

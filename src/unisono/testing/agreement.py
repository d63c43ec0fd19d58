"""Checks that end the same way on all ranks: each says what it found, then all raise or none."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.comm import Communicator
from unisono.errors import name_ranks


def raise_together(title: str, found: Sequence[str], *, comm: Communicator) -> None:
    """Raise one `AssertionError` on every rank if any rank found something. Collective.

    Args:
        title: what was checked.
        found: what this rank found wrong; empty when all is well.
        comm: the ranks that take part.
    """
    __tracebackhide__ = True
    raise_what_was_found(title, comm.all_gather_object(list(found)))


def raise_what_was_found(title: str, everybody: Sequence[Sequence[str]]) -> None:
    """Raise an `AssertionError` if there is anything in the lists that all ranks know.

    Args:
        title: what was checked.
        everybody: what each rank found wrong.
    """
    __tracebackhide__ = True
    by_text: dict[str, list[int]] = {}
    for rank, texts in enumerate(everybody):
        for text in texts:
            by_text.setdefault(text, []).append(rank)
    if by_text:
        lines = [_line(text, ranks, len(everybody)) for text, ranks in by_text.items()]
        raise AssertionError("\n".join([title, *lines]))


def _line(text: str, ranks: Sequence[int], size: int) -> str:
    where = "all ranks" if len(ranks) == size else name_ranks(ranks)
    indented = text.strip().replace("\n", "\n    ")
    return f"  {where}: {indented}" if size > 1 else f"  {indented}"

"""A world on paper: ranks that are not there, for asking layers what they would send.

Partitions on it know places, layers can be built and planned there; nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.comm import Communicator
from unisono.comm.groups import GroupEntry

__all__ = ["OnPaper", "on_paper"]


class OnPaper(Communicator):
    """Ranks of which one is played; the others are taken to say what it says."""

    def broadcast(self, x: Any, src: int = 0, **options: Any) -> Any:  # noqa: ARG002
        """Return the own tensor."""
        return x

    def all_gather_ints(
        self,
        values: Sequence[int],
        *,
        timeout_s: float | None = None,  # noqa: ARG002
    ) -> list[tuple[int, ...]]:
        """Return the own numbers for every rank."""
        return [tuple(values)] * self.size

    def _made(self, ranks: tuple[int, ...]) -> Communicator:
        return on_paper(ranks, ranks.index(self.ranks[self.rank]))


def on_paper(ranks: Sequence[int], rank: int) -> OnPaper:
    """Return these ranks of a world on paper, as place `rank` among them sees them."""
    entry = GroupEntry(None, tuple(ranks), made_by_us=False)
    entry.rank = rank
    entry.name = entry.key = "on paper"
    return OnPaper(entry, device=torch.device("cpu"))

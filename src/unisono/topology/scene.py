"""What a picture of a partition shows, as plain data: blocks, windows, and what passes between.

Made by `draw.py`, painted by `picture.py`. No matplotlib and no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.topology.decompose import grid_index
from unisono.topology.halo_plan import HaloPlan, Piece


@dataclass(frozen=True)
class Picture:
    """What is drawn, all of it computed before."""

    title: str
    grid: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] | None
    plans: Mapping[tuple[int, ...], HaloPlan] | None
    rows: int | None
    """Dim that runs down; None: one row."""
    columns: int | None
    """Dim that runs across; None: one column."""
    outer: tuple[int, ...]
    """Dims that make one grid for each of their indices."""
    itemsize: int

    def size(self, dim: int | None) -> int:
        """Return how many ranks a drawn dim has."""
        return 1 if dim is None else self.grid[dim]

    def index(self, fixed: Mapping[int, int], row: int, column: int) -> tuple[int, ...]:
        """Return the index of a cell of the grid at `fixed` of the outer dims."""
        places = dict(fixed)
        if self.rows is not None:
            places[self.rows] = row
        if self.columns is not None:
            places[self.columns] = column
        return tuple(places[dim] for dim in range(len(self.grid)))

    def between(self, a: tuple[int, ...], b: tuple[int, ...], dim: int | None) -> int:
        """Return the bytes between neighbours in a dim, but for those that go round its ends."""
        if self.plans is None or dim is None:
            return 0
        total = 0
        for mine, other in ((a, b), (b, a)):
            reader = self.plans[other]
            for message in self.plans[mine].sends:
                if message.peer == reader.rank:
                    straight = (p for p in message.pieces if not reader.is_wrapped(p, dim))
                    total += sum(piece.numel for piece in straight)
        return total * self.itemsize

    def wraps(self, dim: int | None) -> bool:
        """Return whether some window goes round the ends of a drawn dim."""
        if dim is None or self.plans is None:
            return False
        return any(plan.wraps and any(plan.wraps[dim]) for plan in self.plans.values())

    def wrapped(self, index: tuple[int, ...], dim: int, side: int) -> list[Piece]:
        """Return what the rank at `index` reads round the left or right end of `dim`.

        Only what comes straight across: from ranks that differ in this dim alone.
        """
        plan = None if self.plans is None else self.plans[index]
        if plan is None or not plan.wraps or not plan.wraps[dim][side]:
            return []
        pieces = [*plan.local, *(piece for message in plan.recvs for piece in message.pieces)]
        others = [d for d in range(len(index)) if d != dim]
        found: list[Piece] = []
        for piece in pieces:
            owner = grid_index(self.grid, piece.owner)
            is_left = piece.dest[dim][1] <= plan.wraps[dim][0]
            is_straight = all(
                owner[d] == index[d] and not plan.is_wrapped(piece, d) for d in others
            )
            if plan.is_wrapped(piece, dim) and is_left == (side == 0) and is_straight:
                found.append(piece)
        return found

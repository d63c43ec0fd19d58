"""What a member does next, by the marks of others and the orders of the coordinator: pure, too.

A step of a member: compute its shards; where there are many sums, wait for those of all, and add up
its piece of them; wait until all have come to the end; apply the step. It waits for marks, not for
the coordinator, and an order only tells of a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.launch.elastic.coordinator import mark_of


class Follower:
    """One member.

    Attributes:
        step: where it is.
        order: who does what in this epoch; empty before the first one.
        mark: how far it has come, for others to see.
        is_held: whether it has to stay where it is.
        stops_at: the step before which it shall stop, if any.
        orders: what it was told, and has not come to yet.
        mistake: what is wrong, if others have left.
    """

    FEW = 2
    """So many sums each member adds up for itself: that takes no longer than to read a result."""

    def __init__(self) -> None:
        self.step = 0
        self.order: dict[str, Any] = {}
        self.mark = 0
        self.is_held = True
        self.stops_at: int | None = None
        self.orders: list[dict[str, Any]] = []
        self.mistake = ""

    @property
    def adds_up_alone(self) -> bool:
        """Whether there is no result that members make together."""
        return sum(end > first for first, end in self.order["runs"]) <= self.FEW

    def due(self, marks: Callable[[], Sequence[int]]) -> str:
        """Return what to do; `marks` gives those of all members, by their places.

        That is `compute`, `reduce`, `commit` or `donate`; `held`, to tell the coordinator so;
        `mismatch`, to tell that others have left; `wait`, for marks, or for orders if it is held;
        `over`, if it is not wanted any more.
        """
        while self.orders:
            if self.orders[0]["step"] > self.step:
                return "commit"  # all marks were there when others went on
            order = self.orders.pop(0)
            kind = order["kind"]
            if kind == "go":
                self.order, self.is_held, self.stops_at = order, False, None
                self.mark = mark_of(order["epoch"], self.step)
            elif kind == "hold":
                self.stops_at = order["at"]
            elif kind == "leave":
                mine = self.order["ranks"][self.order["place"]]
                self.mistake = (
                    f"ranks [{order['rank']}] ended their loop before step {self.step}, "
                    f"ranks [{mine}] have begun that step"
                )
                return "mismatch"
            elif kind in ("donate", "over"):
                return kind
        if self.is_held:
            return "wait"
        if self.stops_at is not None and self.stops_at <= self.step:
            self.is_held = True
            return "held"
        phase = self.mark - mark_of(self.order["epoch"], self.step)
        if phase == 0:
            return "compute"
        if any(mark < self.mark for mark in marks()):
            return "wait"
        return "reduce" if phase == 1 else "commit"

    def is_in_vain(self) -> bool:
        """Whether an order has come that ends what this member is at."""
        return any(order["kind"] != "hold" or order["at"] <= self.step for order in self.orders)

    def has_done(self, what: str) -> None:
        """Come further: `compute` or `reduce` is done. Afterwards others may see the mark."""
        self.mark += 2 if what == "compute" and self.adds_up_alone else 1

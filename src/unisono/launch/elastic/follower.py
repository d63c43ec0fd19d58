"""What a member does next, by the marks of others and the orders of the coordinator: pure, too.

A step of a member: compute its shards; where there are many sums, wait for those of all, and add up
its piece of them; where members are on several hosts, wait until all sums have come, and confirm;
wait until all have come to the end; apply the step. It waits for marks, not for the coordinator.
An order only tells of a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.launch.elastic.coordinator import PHASES, mark_of


class Follower:
    """One member.

    Attributes:
        step: where it is.
        order: who does what in this epoch; empty before the first one.
        mark: how far it has come, for others to see.
        is_held: whether it has to stay where it is.
        stops_at: the step before which it shall stop, if any.
        orders: what it was told, and has not obeyed yet.
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

    @property
    def is_spread(self) -> bool:
        """Whether members are on several hosts: then what they leave has to travel."""
        return len(set(self.order["hosts"])) > 1

    def due(self, marks: Callable[[], Sequence[int]]) -> str:
        """Return what to do; `marks` gives those of all members, by their places.

        That is `compute`, `reduce`, `confirm`, `commit` or `donate`; `held`, to tell the
        coordinator so; `mismatch`, to tell that others have left; `wait`, for marks, or for orders
        if it is held.
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
            elif kind == "donate":
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
        return {1: "reduce", 2: "confirm"}.get(phase, "commit")

    def is_in_vain(self) -> bool:
        """Whether an order has come that ends what this member is at."""
        return any(order["kind"] != "hold" or order["at"] <= self.step for order in self.orders)

    def has_done(self, what: str) -> None:
        """Come further: `compute`, `reduce` or `confirm` is done. Then others may see the mark."""
        phase = {"compute": 1, "reduce": 2, "confirm": PHASES}[what]
        if phase == 1 and self.adds_up_alone:
            phase = 2
        if phase == 2 and not self.is_spread:
            phase = PHASES  # what is left on the board of this host survives its writer
        self.mark = mark_of(self.order["epoch"], self.step) + phase

"""Which ranks train, which shards each computes, and the step at which all resume after a change.

Two pure state machines, without processes, connections or tensors. The `Coordinator` receives
messages and deaths of members, and answers with orders. A `Follower` is one member: it decides by
the marks of the others and these orders what to do next. While no member comes or goes, members
need no orders: they wait for the marks of each other.

    running    members run; a death, a newcomer or a surplus member ends this phase
    holding    each member stops and says which step it is at: at once after a death, because the
               step cannot be finished, else before the next step
    boundary   all stand still: the furthest member says which step is next; newcomers get the state
               of a member; shards are assigned again

A member applies a step when every member has marked its end, and a mark of the end means that this
member has all it needs to apply the step. So if one living member has applied a step, all others
can, and do. If none has, the step is begun again; a dead member that had applied it is gone. That
is safe because members stand still when they say where they are, and the dead write no more.

A step of a member: compute its shards; wait for those of all, and add up its piece of their sums;
where members have memory of their own, wait until all pieces have come, and confirm; wait until all
have come to the end; apply the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Run = tuple[int, int]
"""Shards from the first to before the second."""

MOST = 1024
"""Largest number of members."""
LINE = 64
"""Bytes that each member has at the front of the shared memory, for its mark."""
PHASES = 3
"""Marks of a step: begun, its sums are there, its piece of the result is there; then the next."""
VAIN = 3
"""How often in a row members may fail to reach each other at the same step."""


def split(count: int, parts: int) -> list[Run]:
    """Cut `count` things into contiguous runs, one for each part.

    >>> split(8, 3)
    [(0, 2), (2, 5), (5, 8)]
    """
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def mark_of(epoch: int, step: int) -> int:
    """Return the mark of a member that is about to begin a step, which is also the end of the last.

    The epoch counts first, so that marks from before a change are never enough.
    """
    return (epoch << 40) + PHASES * step


def step_of(mark: int) -> int:
    """Return the step that a member with this mark is at.

    >>> step_of(mark_of(3, 17) + 2)
    17
    """
    return mark % (1 << 40) // PHASES


@dataclass
class ElasticMember:
    """A process that trains, for the coordinator."""

    rank: int
    """Its number, for people."""
    address: Any = None
    """Where others reach it; None if all share one memory."""
    mark: int = 0
    """Its last known mark."""
    has_left: bool = False
    """Whether its loop has ended."""


class Coordinator:
    """Decides for one training. Members are known by numbers that are never used again.

    Args:
        target: number of members to reach; the first step waits for all of them.
        least: with fewer, no new step begins.
    """

    def __init__(self, target: int, least: int = 1) -> None:
        self.target = target
        self.least = least
        self.step = 0
        """The first step of this epoch."""
        self.epoch = 0
        """Counts changes of members."""
        self.reached = 0
        """The step of the furthest member, as far as is known: a change without need waits for the
        next one. If it comes too late, a step is computed for nothing, no more."""
        self.phase = "boundary"
        """`boundary`, `running`, `holding`, `over` (all have left), or `lost` (all have died)."""
        self.members: dict[int, ElasticMember] = {}
        self.error: str | None = None
        """A mistake of the program, found by its members."""
        self.retired: list[int] = []
        """Members and newcomers that are surplus; the caller ends them."""
        self._shards = 0
        self._first = 0
        self._newcomers: dict[int, tuple[int, int, Any]] = {}
        self._loading: dict[int, bool] = {}
        self._donor: int | None = None
        self._stands_at: dict[int, int] = {}
        """The step of each member that stands still."""
        self._parted_at, self._parted = -1, 0
        self._outbox: list[tuple[int, dict[str, Any]]] = []

    def take_orders(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the orders that are due, each with its receiver."""
        orders, self._outbox = self._outbox, []
        return orders

    def late(self) -> list[int]:
        """Return the members that others wait for.

        None if no member is further than another: then the program may do something else.
        """
        if self.phase == "boundary":
            waiting = [number for number, has_it in self._loading.items() if not has_it]
            return waiting if self._donor is None else [self._donor]
        if self.phase == "holding":
            missing = [number for number in self.members if number not in self._stands_at]
            return missing if len(missing) < len(self.members) else []
        furthest = max((member.mark for member in self.members.values()), default=0)
        return [number for number, member in self.members.items() if member.mark < furthest]

    def joined(
        self, number: int, *, rank: int, shards: int, step: int, address: Any = None
    ) -> None:
        """Handle a process that asks to train; its state is at `step`."""
        self._shards = shards
        if self.phase in ("over", "lost") or self._has_leavers():
            self.retired.append(number)
            return
        self._newcomers[number] = rank, step, address
        self._go_on()

    def receive(self, number: int, message: Mapping[str, Any]) -> None:
        """Handle a message of a member or newcomer; those of the dead come before their death."""
        kind = message["kind"]
        if kind == "loaded" and number in self._loading:
            self._loading[number] = True
            self._go_on()
        elif kind == "missed" and number in self._loading:
            del self._loading[number]  # its donor is gone: it waits for another one
            self._go_on()
        elif kind == "donated" and number == self._donor:
            self._donor = None
            donor = self.members[number]
            room = max(0, min(self.target, MOST) - len(self.members))
            for newcomer in sorted(self._newcomers, key=lambda n: self._newcomers[n][0])[:room]:
                self._loading[newcomer] = False
                count, address = message["bytes"], donor.address
                self._order(newcomer, "load", step=self.step, bytes=count, address=address)
            self._go_on()  # those it was for may be gone
        elif number not in self.members:
            return
        elif kind == "mark":
            self.members[number].mark = message["mark"]
            self.reached = max(self.reached, step_of(message["mark"]))
        elif kind == "held" and self.phase == "holding":
            self._stands_at[number] = message["step"]
            self._go_on()
        elif kind == "parted" and message["epoch"] == self.epoch:
            self._part(message["why"])
        elif kind == "mismatch":
            self.error = self.error or message["why"]
        elif kind == "left":
            self._leave(number, message["step"])

    def died(self, number: int) -> None:
        """Handle the death of a process. Safe to repeat."""
        self._newcomers.pop(number, None)
        self._loading.pop(number, None)
        if number in self.retired:
            self.retired.remove(number)
        if number == self._donor:
            self._donor = None
        member = self.members.pop(number, None)
        self._stands_at.pop(number, None)
        if member is not None and self.phase in ("running", "holding") and not self._has_leavers():
            self._hold(0)
        if self.phase not in ("over", "lost"):
            self._go_on()

    def resize(self, target: int) -> None:
        """Change the number of members."""
        self.target = target
        self._go_on()

    def _go_on(self) -> None:
        """Change the phase if the members allow it, and order what follows."""
        if self.members and all(member.has_left for member in self.members.values()):
            self.phase = "over"
        if self.phase == "over" or self._has_leavers():
            return
        if self.phase == "running" and len(self.members) >= self.target:
            self._retire_newcomers()
        if self.phase == "running" and (self._newcomers or len(self.members) > self.target):
            self._hold(self.reached + 1)
        if self.phase == "holding" and self.members.keys() <= self._stands_at.keys():
            self.step = max(self._stands_at.values(), default=max(self.step, self.reached))
            self.phase = "boundary"
            self._stands_at.clear()
        if self.phase == "boundary" and self._donor is None and all(self._loading.values()):
            self._admit()
            self._at_boundary()

    def _hold(self, at: int) -> None:
        """Order members to stop at a step, or where they are if that is further."""
        self.phase = "holding"
        for number in self.members.keys() - self._stands_at.keys():
            self._order(number, "hold", step=self.step, at=at)

    def _part(self, why: str) -> None:
        """Let members that cannot reach each other try again in another epoch, a few times."""
        if self.phase != "running" or self._has_leavers():
            return
        self._parted = self._parted + 1 if self.step == self._parted_at else 1
        self._parted_at = self.step
        if self._parted > VAIN:
            self.error = self.error or why
        self._hold(0)
        self._go_on()

    # Boundary.

    def _at_boundary(self) -> None:
        """Bring the number of members to the target, then let them run."""
        if not self.members:
            if self.step > self._first:
                self.phase = "lost"
                return
            # Nothing has happened, so nothing is lost: another one begins with its own state.
            if len(self._newcomers) < self.target:
                return
            first = min(self._newcomers, key=lambda number: self._newcomers[number][0])
            rank, self.step, address = self._newcomers.pop(first)
            self._first = self.step
            self.members[first] = ElasticMember(rank, address)
            self._order(first, "found", step=self.step)
        while len(self.members) > self.target:
            number = max(self.members, key=lambda n: self.members[n].rank)
            del self.members[number]
            self.retired.append(number)
        if self._newcomers and len(self.members) < min(self.target, MOST):
            self._donor = min(self.members)
            self._order(self._donor, "donate", step=self.step)
        elif len(self.members) >= min(self.least, self.target):
            self._retire_newcomers()
            self._run()

    def _admit(self) -> None:
        """Make newcomers that have loaded the state members."""
        for number in self._loading:
            rank, _, address = self._newcomers.pop(number)
            self.members[number] = ElasticMember(rank, address)
        self._loading.clear()

    def _run(self) -> None:
        self.phase, self.epoch = "running", self.epoch + 1
        runs = split(self._shards, len(self.members))
        ranks = [member.rank for member in self.members.values()]
        addresses = [member.address for member in self.members.values()]
        is_spread = len(addresses) > 1 and addresses[0] is not None
        for place, number in enumerate(self.members):
            self._order(
                number,
                "go",
                step=self.step,
                epoch=self.epoch,
                place=place,
                ranks=ranks,
                runs=runs,
                addresses=addresses if is_spread else [],
                logger=number == min(self.members),
            )

    def _retire_newcomers(self) -> None:
        self.retired += [*self._newcomers]
        self._newcomers.clear()
        self._loading.clear()

    # The end.

    def _has_leavers(self) -> bool:
        return any(member.has_left for member in self.members.values())

    def _leave(self, number: int, step: int) -> None:
        """Handle the end of a loop: all others must end theirs at the same step."""
        self.members[number].has_left = True
        self._donor = None
        self._retire_newcomers()
        for other, member in self.members.items():
            if not member.has_left:
                self._order(other, "leave", step=step, rank=self.members[number].rank)
        self._go_on()

    def _order(self, number: int, kind: str, **rest: Any) -> None:
        self._outbox.append((number, {"kind": kind, **rest}))


class Follower:
    """The decisions of one member.

    Attributes:
        step: where it is.
        order: who does what in this epoch; empty before the first one.
        mark: its progress, for others to see.
        is_held: whether it has to wait for an order.
        stops_at: the step before which to stop, if any.
        orders: orders that are still to be carried out.
        mistake: what is wrong, if others have left.
    """

    def __init__(self) -> None:
        self.step = 0
        self.order: dict[str, Any] = {}
        self.mark = 0
        self.is_held = True
        self.stops_at: int | None = None
        self.orders: list[dict[str, Any]] = []
        self.mistake = ""

    @property
    def is_spread(self) -> bool:
        """Whether each member has memory of its own: then sums have to travel."""
        return bool(self.order["addresses"])

    @property
    def is_at_end(self) -> bool:
        """Whether this member has marked the end of its step."""
        return self.mark == mark_of(self.order["epoch"], self.step + 1)

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
                rank = self.order["ranks"][self.order["place"]]
                self.mistake = (
                    f"ranks [{order['rank']}] ended their loop before step {self.step}, "
                    f"ranks [{rank}] have begun that step"
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
        """Whether an order makes the current work of this member useless."""
        return any(order["kind"] != "hold" or order["at"] <= self.step for order in self.orders)

    def has_done(self, what: str) -> None:
        """Advance the mark after `compute`, `reduce` or `confirm`; then others may see it."""
        phase = {"compute": 1, "reduce": 2, "confirm": PHASES}[what]
        if phase == 2 and not self.is_spread:
            phase = PHASES  # what is left in memory that all share survives its writer
        self.mark = mark_of(self.order["epoch"], self.step) + phase

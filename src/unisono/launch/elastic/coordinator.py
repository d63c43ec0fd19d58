"""Who computes which shard, who adds up what, and when a step has happened: a pure state machine.

It is told what members say and who has died, and answers with orders; nothing here knows of
processes, sockets or tensors. The step of a member, as the coordinator sees it:

    boundary   newcomers get the state of a member; shards are dealt out
    compute    members leave sums of shards on the board; shards of the dead go to others
    reduce     each member adds up its piece of all sums; pieces of the dead go to others
    commit     all pieces are there: the step has happened, whoever dies from here on

Where there are few sums, reduce is left out, and each member adds them up for itself: that takes no
longer than to read a result. Until the commit no member has changed its model, after it every
member does. Three rules make that safe. Whoever reports the dead has made sure that they write no
more, and has passed on all that they said before. No piece of a step is added up before all members
have begun that step, so nobody still reads the result of the step before. And sums of two steps lie
apart, so nobody still reads those of the step before the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = tuple[int, int]
"""Shards from the first to before the second."""

OVER = "the elastic training was over before this rank could join it"
"""What a rank of another host says that comes too late."""
LOST = "the coordinator of this elastic training is gone, or has ended this rank"
"""What a rank says that others waited for in vain."""


def split(count: int, parts: int) -> list[Run]:
    """Cut `count` things into contiguous runs, one for each part.

    >>> split(8, 3)
    [(0, 2), (2, 5), (5, 8)]
    """
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


@dataclass
class Member:
    """What the coordinator knows of one process that trains."""

    rank: int
    """Its place, for people."""
    owes: list[Run] = field(default_factory=list)
    """Shards of this step that it has not reported yet."""
    pieces: list[int] = field(default_factory=list)
    """Pieces of the sum that it has not reported yet."""
    has_begun: bool = False
    """Whether it has reported in this step, so that it has done with the step before."""
    has_left: bool = False
    """Whether its loop has ended."""
    taken: str | None = None
    """What its program did since the last step, the same for all members."""


class Coordinator:
    """Decides for one training. Members are known by numbers that are never used again.

    Args:
        target: how many members there shall be; the first step waits for as many.
        least: with fewer, no new step begins.
    """

    FEW = 2
    """So many runs of shards each member adds up for itself."""

    def __init__(self, target: int, least: int = 1) -> None:
        self.target = target
        self.least = least
        self.step = 0
        self.phase = "boundary"
        """`boundary`, `compute`, `reduce`, `over` (all have left), or `lost` (all have died)."""
        self.members: dict[int, Member] = {}
        self.error: str | None = None
        """What members have done that cannot be right."""
        self.retired: list[int] = []
        """Members and newcomers that are not wanted any more; whoever asks takes them away."""
        self._shards = 0
        self._newcomers: dict[int, tuple[int, int]] = {}
        self._loading: dict[int, bool] = {}
        self._donor: int | None = None
        self._done: list[Run] = []
        self._cut = 1
        self._is_stopping = False
        self._has_committed = False
        self._outbox: list[tuple[int, dict[str, Any]]] = []

    def take_orders(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the orders that are due, each with its receiver."""
        orders, self._outbox = self._outbox, []
        return orders

    @property
    def late(self) -> list[int]:
        """Those for whom others wait."""
        if self.phase == "boundary":
            waiting = [number for number, has_it in self._loading.items() if not has_it]
            return waiting if self._donor is None else [self._donor]
        return [
            number
            for number, member in self.members.items()
            if self.phase in ("compute", "reduce")
            and (member.owes or member.pieces or not member.has_begun)
        ]

    @property
    def waits_for_user(self) -> bool:
        """Whether nobody has begun the step: then the program is at something else."""
        return not any(member.has_begun for member in self.members.values())

    def joined(self, number: int, *, rank: int, shards: int, step: int) -> None:
        """A process wants to train; `step` is where its own state is."""
        self._shards = shards
        if self.phase == "over" or self._has_leavers():
            self.retired.append(number)
            return
        self._newcomers[number] = rank, step
        self._at_boundary()

    def told(self, number: int, message: Mapping[str, Any]) -> None:
        """A member or newcomer has said something; what the dead said comes before their death."""
        kind, step = message["kind"], message.get("step")
        if kind == "loaded" and number in self._loading:
            self._loading[number] = True
            self._admit()
            return
        member = self.members.get(number)
        if member is None:
            return
        if kind == "done" and step == self.step and self.phase == "compute":
            member.has_begun, member.taken = True, message.get("taken")
            self._is_stopping |= bool(message.get("stop"))
            for run in map(tuple, message["runs"]):
                member.owes.remove(run)
                self._done.append(run)
            self._check_leavers()
            self._check_taken()
            self._after_compute()
        elif kind == "reduced" and step == self.step and self.phase == "reduce":
            for piece in message["pieces"]:
                member.pieces.remove(piece)
            self._after_reduce()
        elif kind == "donated" and number == self._donor:
            self._donor = None
            room = max(0, self.target - len(self.members))
            for newcomer in sorted(self._newcomers, key=lambda n: self._newcomers[n][0])[:room]:
                self._loading[newcomer] = False
                self._order(newcomer, "load", step=self.step, bytes=message["bytes"])
            self._admit()  # those it was for may be gone
        elif kind == "left":
            member.has_left = True
            self._donor = None
            self._loading.clear()
            if self.phase == "boundary":  # others that do not leave shall be seen to begin
                self._begin()
            self._check_leavers()
            self._after_leaving()

    def died(self, number: int) -> None:
        """A process is gone, and its work is given away. Safe to repeat."""
        self._newcomers.pop(number, None)
        self._loading.pop(number, None)
        if number in self.retired:
            self.retired.remove(number)
        if number == self._donor:
            self._donor = None
        member = self.members.pop(number, None)
        if self.phase in ("over", "lost"):
            return
        if self._has_leavers():
            self._after_leaving()
        elif member is not None and not self.members and not self._loading:
            # Before the first commit nothing is lost: another one begins with its own state.
            self.phase = "lost" if self._has_committed else "boundary"
            self._at_boundary()
        elif self.phase == "boundary":
            self._admit()
        elif self.phase == "compute" and member is not None:
            self._give_away(member.owes)
            self._after_compute()
        elif self.phase == "reduce" and member is not None:
            numbers = list(self.members)
            for place, piece in enumerate(member.pieces):
                self._reduce(numbers[place % len(numbers)], [piece])
            self._after_reduce()

    def resize(self, target: int) -> None:
        """Have another number of members, from the next step on."""
        self.target = target
        self._at_boundary()

    # Boundary.

    def _at_boundary(self) -> None:
        """Bring members to the wanted number, then begin the step."""
        if self.phase != "boundary" or self._has_leavers() or self._donor is not None:
            return
        if any(not has_it for has_it in self._loading.values()):
            return
        if not self.members and not self._found():
            return
        if self._newcomers and len(self.members) < self.target:
            self._donor = min(self.members)
            self._order(self._donor, "donate", step=self.step)
        elif len(self.members) >= min(self.least, self.target):
            self.retired += [*self._newcomers]
            self._newcomers.clear()
            self._begin()

    def _found(self) -> bool:
        """Take the first member, whose state all others get; return whether there is one."""
        if len(self._newcomers) < self.target:
            return False
        first = min(self._newcomers, key=lambda number: self._newcomers[number][0])
        rank, self.step = self._newcomers.pop(first)
        self.members[first] = Member(rank)
        self._order(first, "found", step=self.step)
        return True

    def _admit(self) -> None:
        """Make members of newcomers once all that were given the state have taken it, or died."""
        if all(self._loading.values()):
            for number in self._loading:
                rank, _ = self._newcomers.pop(number)
                self.members[number] = Member(rank)
            self._loading.clear()
            self._at_boundary()

    def _begin(self) -> None:
        self.phase, self._done = "compute", []
        runs = split(self._shards, len(self.members))
        # A share may be empty; its member still has to say that it has begun.
        for (number, member), (first, end) in zip(self.members.items(), runs, strict=True):
            member.has_begun, member.pieces = False, []
            member.owes = [(first, end)] if end > first else []
            self._order(number, "compute", step=self.step, runs=list(member.owes))

    # Compute, reduce, commit.

    def _give_away(self, runs: Sequence[Run]) -> None:
        for first, end in runs:
            parts = split(end - first, len(self.members))
            for (number, member), (a, b) in zip(self.members.items(), parts, strict=True):
                if b > a:
                    run = (first + a, first + b)
                    member.owes.append(run)
                    self._order(number, "compute", step=self.step, runs=[run])

    def _after_compute(self) -> None:
        if self.phase != "compute" or self._has_leavers():
            return
        if any(member.owes or not member.has_begun for member in self.members.values()):
            return
        if len(self._done) <= self.FEW:
            self._commit(sorted(self._done))
        else:
            self.phase, self._cut = "reduce", len(self.members)
            for piece, number in enumerate(list(self.members)):
                self._reduce(number, [piece])

    def _reduce(self, number: int, pieces: list[int]) -> None:
        self.members[number].pieces += pieces
        done = sorted(self._done)
        self._order(number, "reduce", step=self.step, pieces=pieces, cut=self._cut, runs=done)

    def _after_reduce(self) -> None:
        if self.phase == "reduce" and not any(m.pieces for m in self.members.values()):
            self._commit(None)

    def _commit(self, runs: list[Run] | None) -> None:
        """The step has happened. `runs` are those that members add up; None: it has been done."""
        step, self.step, self.phase = self.step, self.step + 1, "boundary"
        self._has_committed = True
        # Who is not wanted any more goes now, as nobody is at the step before: later, it might
        # still read, and save, what others write already.
        while len(self.members) > self.target:
            number = max(self.members, key=lambda n: self.members[n].rank)
            del self.members[number]
            self.retired.append(number)
        logger = min(self.members)
        for number in self.members:
            self._order(
                number,
                "commit",
                step=step,
                runs=runs,
                stop=self._is_stopping,
                members=len(self.members),
                logger=number == logger,
            )
        self._at_boundary()

    # The end.

    def _has_leavers(self) -> bool:
        return any(member.has_left for member in self.members.values())

    def _check_leavers(self) -> None:
        """All members leave at the same step, or somebody would end with another model."""
        gone = [m.rank for m in self.members.values() if m.has_left]
        stay = [m.rank for m in self.members.values() if m.has_begun and not m.has_left]
        if gone and stay and self.phase == "compute":
            self.error = (
                f"ranks {gone} ended their loop before step {self.step}, "
                f"ranks {stay} have begun that step"
            )

    def _check_taken(self) -> None:
        """What programs do between steps they do alike, or members would train two models."""
        ways: dict[str | None, list[int]] = {}
        for member in self.members.values():
            if member.has_begun:
                ways.setdefault(member.taken, []).append(member.rank)
        if len(ways) > 1 and self.error is None:
            parted = " and ".join(f"ranks {ranks}" for ranks in ways.values())
            self.error = (
                f"{parted} came to step {self.step} with other parameters, buffers or settings of "
                "the optimizer: their programs changed them between steps, and not alike"
            )

    def _after_leaving(self) -> None:
        if all(member.has_left for member in self.members.values()):
            self.phase = "over"
            self.retired += [*self._newcomers]
            self._newcomers.clear()
            self._loading.clear()

    def _order(self, number: int, kind: str, **rest: Any) -> None:
        self._outbox.append((number, {"kind": kind, **rest}))

"""The policy of a run whose ranks may die and join: ranks that die are replaced.

`ReplacingPolicy` replaces processes of this run; `ElasticPolicy` also carries messages and orders
between the members of a training and their coordinator. An exception in the function of a rank ends
the run, as in any other: the next rank would raise it again.
"""

from __future__ import annotations

import json
import sys
import time
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import CollectiveMismatch, PlatformError
from unisono.launch.channel import new_key
from unisono.launch.elastic.coordinator import PHASES, Coordinator, mark_of
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import RankState
from unisono.launch.supervisor import COLLECT_S, Policy, Ranks

if TYPE_CHECKING:
    from unisono.launch.places.guests import Guests

LOOK_S = 0.1
"""Seconds between two checks of ranks that others wait for."""
RETIRE_S = 5.0
"""Time for a surplus rank to end before it is killed."""
EVENTS = "members.jsonl"
"""File of a job with one line for each member that joined, died or was retired."""


class ReplacingPolicy(Policy):
    """Replaces ranks that die, and retires surplus ones.

    Args:
        most: largest number of ranks.
        shows: whether to print what happens.
    """

    look_s = LOOK_S
    replaces = True
    preload = ("torch._dynamo", "unisono.train.exact.run")  # others wait while a rank loads them

    def __init__(self, *, most: int, shows: bool) -> None:
        self._most = most
        self._shows = shows
        self._ranks: Ranks
        self._is_settled = False
        self._retired: dict[int, tuple[RankState, float]] = {}
        """Ranks that were asked to end, and when they are killed."""
        self._has_left: set[int] = set()
        """Ranks whose loops have ended."""
        self._deaths_in_a_row = 0
        self._step_of_death = -1
        self._next_look = 0.0

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the training has ended."""

    @property
    @abstractmethod
    def target(self) -> int:
        """The number of ranks that this run should have."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The step of the furthest member, as far as is known."""

    @abstractmethod
    def lost(self, rank: int) -> None:
        """Report the end of a rank of this run to the coordinator."""

    @abstractmethod
    def is_alone(self) -> bool:
        """Whether all members are ranks of this run."""

    def start(self, ranks: Ranks) -> None:
        """Remember the ranks, which are about to be started."""
        self._ranks = ranks

    def settle(self) -> None:
        """Stop replacing ranks: all are about to end."""
        self._is_settled, self.look_s = True, None

    def look(self) -> None:
        """Handle ranks that have died, are stopped or are missing."""
        if self._is_settled:
            return
        self._check_returned()
        self._forget_dead()
        self._end_retired()
        if any(state.is_bad for state in self._ranks.states):
            self.settle()  # the run ends
            return
        self._bring_to_size()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self.look_at_slow()

    def look_at_slow(self) -> None:
        """Handle ranks that are stopped; called every `LOOK_S`."""
        if isinstance(self._ranks, RankMonitor):
            for rank in self._ranks.kill_stopped():
                self.say(f"rank {rank.rank} is ended: it was stopped by a signal")

    def retire(self, rank: int) -> None:
        """Ask a surplus rank to end."""
        for state in self._ranks.states:
            if state.rank == rank and rank not in self._retired and not state.is_over:
                self._retired[rank] = state, time.monotonic() + RETIRE_S
                self._ranks.end_rank(rank, at_once=False)
                return

    def say(self, text: str) -> None:
        """Print a line about the run."""
        if self._shows:
            print(f"unisono: {text}", file=sys.stderr, flush=True)

    def _check_returned(self) -> None:
        for state in self._ranks.states:
            if state.is_good and state.rank not in self._has_left:
                raise PlatformError.because(
                    "unisono.run(..., elastic=True)",
                    f"rank {state.rank} has returned without training: each rank is a world of one",
                    None,
                    "for step in unisono.train.elastic(model, optimizer, data, ...) in the "
                    "function; elastic=False for all other trainings",
                )

    def _forget_dead(self) -> None:
        """Forget ranks that died; the death of the last member ends the attempt."""
        for state in [state for state in self._ranks.states if state.state == "died"]:
            self.lost(state.rank)
            if not self.is_over:
                is_new = self.step != self._step_of_death
                self._deaths_in_a_row = 1 if is_new else self._deaths_in_a_row + 1
                self._step_of_death = self.step
            alive = [other for other in self._ranks.states if not other.is_bad]
            is_last = not alive and self.is_alone()
            if is_last or self._deaths_in_a_row > max(8, 4 * self._most):
                continue  # its death is the reason of the end
            self._ranks.forget_rank(state.rank)

    def _end_retired(self) -> None:
        for rank, (state, kill_at) in list(self._retired.items()):
            if state.exit_code is not None or state.state == "died":
                del self._retired[rank]
                self.lost(rank)
                self._ranks.forget_rank(rank)
            elif time.monotonic() > kill_at:
                self._ranks.end_rank(rank, at_once=True)

    def _bring_to_size(self) -> None:
        """Start the ranks that are missing."""
        states = self._ranks.states
        if self.is_over or any(state.is_good for state in states):
            return
        occupied = {state.rank for state in states}
        missing = self.target - len(occupied)
        for place in range(self._most):
            if missing > 0 and place not in occupied and place not in self._retired:
                self._has_left.discard(place)
                missing -= self._ranks.start_rank(place)


@dataclass(eq=False)
class Candidate:
    """A process that trains, or asks to."""

    number: int
    memory: str
    """Processes with equal names share memory."""
    rank: int
    pid: int
    host: str
    is_guest: bool
    """Whether it is a rank of another launcher."""
    mark: int = 0
    """Its last reported mark; other members may have seen a later one."""
    since: float = field(default_factory=time.monotonic)
    has_entered: bool = False


class ElasticPolicy(ReplacingPolicy):
    """Serves the coordinator of one training.

    Args:
        most: largest number of ranks of this run.
        least: with fewer members no step begins.
        stall_s: longest wait of members for another one before that is ended.
        job_dir: directory of the run, for the file of events.
        is_spread: whether members may be on several hosts.
        guests: ranks of other launchers.
        shows: whether to print what happens.

    Attributes:
        recovered_s: from each death to the end of the step that it hit.
        joined_s: from each arrival to the first step as a member.
    """

    def __init__(
        self,
        *,
        most: int,
        least: int,
        stall_s: float,
        job_dir: Path,
        is_spread: bool = False,
        guests: Guests | None = None,
        shows: bool = False,
    ) -> None:
        super().__init__(most=most, shows=shows)
        self.coordinator = Coordinator(most, least)
        self._least, self._stall_s, self._job_dir = least, stall_s, job_dir
        self._guests: Guests | None = guests
        self._key = new_key().hex() if is_spread or guests is not None else ""
        self._seats: dict[int, Candidate] = {}
        self._count = 0
        self._facts: dict[str, Any] | None = None
        self._news_at = time.monotonic()
        self._died_at: list[float] = []
        self.recovered_s: list[float] = []
        self.joined_s: list[float] = []
        self._seen_members: set[int] = set()

    def start(self, ranks: Ranks) -> None:
        super().start(ranks)
        if self._guests is not None and isinstance(ranks, RankMonitor):
            self._guests.start(self)
            ranks.listen(self._guests.fileno(), self._guests.turn)

    def close(self) -> None:
        if self._guests is not None:
            self._guests.close()

    @property
    def is_over(self) -> bool:
        return self.coordinator.phase in ("over", "lost")

    @property
    def target(self) -> int:
        return self.coordinator.target - self._guest_count()

    @property
    def step(self) -> int:
        begun = mark_of(self.coordinator.epoch, 0)
        steps = ((seat.mark - begun) // PHASES for seat in self._seats.values())
        return max([self.coordinator.step, *steps])

    def is_alone(self) -> bool:
        return not self._guest_count() or self.coordinator.phase == "lost"

    def _guest_count(self) -> int:
        return sum(seat.is_guest for seat in self._seats.values() if seat.has_entered)

    def resize(self, ranks: int) -> None:
        """Change the number of ranks from the next step on; only in the supervising thread."""
        ranks = max(self._least, min(ranks, self._most))
        self.coordinator.reached = self.step
        self.coordinator.resize(ranks + self._guest_count())
        self.say(f"resized to {ranks} ranks")
        self._deliver()
        self.look()

    def settle(self) -> None:
        super().settle()
        if self.coordinator.phase == "lost":
            self.remark = (
                "  no member is left, and their state with them; max_restarts=1 begins again, "
                "from a checkpoint if the function restores one"
            )

    # Messages of members.

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message of a rank of this run."""
        self.take(self._ranks.memory_of(rank), rank, message)
        if message["kind"] == "left":
            self._has_left.add(rank)

    def take(
        self, memory: str, rank: int, message: dict[str, Any], *, is_guest: bool = False
    ) -> None:
        """Handle a message of a rank of this run or, as `is_guest`, of another launcher."""
        self._news_at = time.monotonic()
        kind, seat = message["kind"], self._seat_of(memory, rank)
        if kind == "join":
            if seat is not None:
                self._leave_seat(seat)
            self._welcome(memory, rank, message, is_guest=is_guest)
        elif seat is None:
            return
        elif kind == "mark":
            seat.mark = message["mark"]
        elif kind == "enter":
            seat.has_entered = True
            self.coordinator.target += seat.is_guest
            self.coordinator.reached = self.step
            self.coordinator.joined(
                seat.number,
                rank=rank,
                shards=message["shards"],
                step=message["step"],
                host=memory,
                address=message["address"],
            )
        elif kind == "going":
            is_current = message["epoch"] == self.coordinator.epoch
            if is_current and self.coordinator.phase == "running":
                self.recovered_s += [self._news_at - at for at in self._died_at]
                self._died_at.clear()
        else:
            self.coordinator.receive(seat.number, message)
        self._deliver()

    def lost(self, rank: int) -> None:
        """Handle the end of a rank of this run."""
        self.take_end(self._ranks.memory_of(rank), rank)

    def take_end(self, memory: str, rank: int) -> None:
        """Handle the end of a rank of any launcher."""
        if (seat := self._seat_of(memory, rank)) is not None:
            self._leave_seat(seat)
            self._deliver()

    def _seat_of(self, memory: str, rank: int) -> Candidate | None:
        seats = self._seats.values()
        return next((s for s in seats if (s.memory, s.rank) == (memory, rank)), None)

    def _welcome(self, memory: str, rank: int, message: dict[str, Any], *, is_guest: bool) -> None:
        """Accept a newcomer, unless its results would differ in their bits."""
        facts: dict[str, Any] = message["facts"]
        others = self._facts = self._facts or facts
        pid, host = message["pid"], message["host"]
        seat = Candidate(self._count, memory, rank, pid, host, is_guest)
        if facts != others:
            shown = [
                f"{name}: {facts[name]} on rank {rank}, {others.get(name)} on the others"
                for name in sorted(facts)
                if facts[name] != others.get(name)
            ]
            self._send(seat, {"kind": "refused", "why": "\n".join(shown)})
            return
        self._count += 1
        self._seats[seat.number] = seat
        self._send(seat, {"kind": "welcome", "host": memory, "key": self._key})

    def _leave_seat(self, seat: Candidate) -> None:
        """Report the end of a process to the coordinator, which reassigns its work."""
        del self._seats[seat.number]
        member = self.coordinator.members.get(seat.number)
        if member is not None and member.has_left:
            return
        if member is not None:
            self._died_at.append(time.monotonic())
        if self.coordinator.phase != "over" and seat.has_entered:
            is_retired = seat.number in self.coordinator.retired
            self._note_event("retired" if is_retired else "died", seat.rank)
        self.coordinator.target -= seat.is_guest and seat.has_entered
        self.coordinator.died(seat.number, seat.mark)

    def _deliver(self) -> None:
        """Send the orders of the coordinator, and record new members."""
        coordinator = self.coordinator
        for number, order in coordinator.take_orders():
            if (seat := self._seats.get(number)) is not None:
                self._send(seat, order)
        for number in coordinator.members.keys() - self._seen_members:
            if (seat := self._seats.get(number)) is not None:
                self.joined_s.append(time.monotonic() - seat.since)
                self._seen_members.add(number)
                self._note_event("joined", seat.rank)

    def _send(self, seat: Candidate, order: dict[str, Any]) -> None:
        order = {**order, "pid": seat.pid}
        if seat.is_guest and self._guests is not None:
            self._guests.send(seat.memory, {"rank": seat.rank, "order": order})
        else:
            self._ranks.order_rank(seat.rank, elastic=order)

    # Deaths, stalls and surplus members.

    def look(self) -> None:
        """Handle members that have died, are stopped, are missing or are surplus."""
        if self._is_settled:
            return
        if self.coordinator.error is not None:
            self._raise_mistake(self.coordinator.error)
        for number in list(self.coordinator.retired):
            self._end(number, at_once=False)
        if self.coordinator.phase == "over":
            self._retire_late_newcomers()
        super().look()

    def look_at_slow(self) -> None:
        super().look_at_slow()
        if self._guests is not None:
            self._guests.look()
        quiet_s = time.monotonic() - self._news_at
        if quiet_s <= self._stall_s:
            return
        members = self.coordinator.members
        marks = {n: seat.mark for n, seat in self._seats.items() if n in members}
        for number in self.coordinator.late(marks):
            if (seat := self._seats.get(number)) is not None:
                self.say(f"rank {seat.rank} on {seat.host} is ended: quiet for {quiet_s:.0f} s")
                self._end(number, at_once=True)
        self._news_at = time.monotonic()

    def _raise_mistake(self, error: str) -> None:
        # A rank that fails leaves its loop, too; then its own error says more.
        self.settle()
        end = time.monotonic() + COLLECT_S
        while not self._ranks.is_bad() and (remaining_s := end - time.monotonic()) > 0:
            self._ranks.wait(remaining_s)
        if not self._ranks.is_bad():
            raise CollectiveMismatch.because(
                "the loops of an elastic training",
                error,
                None,
                "decide by what all members know alike: step.number, step.loss, "
                "unisono.should_stop()",
            )

    def _end(self, number: int, *, at_once: bool) -> None:
        """End a member, or a surplus newcomer."""
        seat = self._seats.get(number)
        if seat is None:
            return
        if seat.is_guest and self._guests is not None:
            order = "kill" if at_once else "retire"
            self._guests.send(seat.memory, {"rank": seat.rank, order: True})
        elif at_once:
            self._ranks.end_rank(seat.rank, at_once=True)
        else:
            self.retire(seat.rank)

    def _retire_late_newcomers(self) -> None:
        """Retire ranks that have not begun the training, which is over."""
        seated = {seat.rank for seat in self._seats.values() if not seat.is_guest}
        for state in list(self._ranks.states):
            if state.rank not in seated | self._has_left and not state.is_over:
                self.retire(state.rank)

    def _note_event(self, what: str, rank: int) -> None:
        """Record what happened to a member, for users and for the live page."""
        members = sum(number in self._seats for number in self.coordinator.members)
        event = {"what": what, "rank": rank, "step": self.step, "members": members}
        with suppress(OSError), (self._job_dir / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**event, "at": time.time()}) + "\n")
        if what == "died":
            self.say(f"rank {rank} died at step {event['step']}; {members} go on")


def read_events(job_dir: Path) -> list[dict[str, Any]]:
    """Return the events of the members of a job, the latest last."""
    with suppress(OSError):
        lines = (job_dir / EVENTS).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]
    return []

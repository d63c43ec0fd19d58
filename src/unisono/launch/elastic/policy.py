"""The policy of a run whose ranks may die and join.

It carries messages and orders between members and their coordinator, and replaces ranks that die.
An exception in the function of a rank ends the run, as in any other: the next rank would raise it
again.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import CollectiveMismatch, PlatformError
from unisono.launch.elastic.coordinator import Coordinator
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import RankState, RunPlan
from unisono.launch.supervisor import COLLECT_S, Policy, Ranks

LOOK_S = 0.1
"""Seconds between two checks of ranks that others wait for."""
RETIRE_S = 5.0
"""Time for a surplus rank to end before it is killed."""
EVENTS = "members.jsonl"
"""File of a job with one line for each member that joined, died or was retired."""


@dataclass(frozen=True)
class Candidate:
    """A process that trains, or asks to."""

    number: int
    """Its number for the coordinator."""
    rank: int
    pid: int
    host: str


class ElasticPolicy(Policy):
    """Serves the coordinator of one training.

    Args:
        most: largest number of ranks.
        least: with fewer members no step begins.
        stall_s: longest wait of members for another one before that is ended.
        job_dir: directory of the run, for the file of events.
        shows: whether to print what happens.
    """

    look_s = LOOK_S
    replaces = True
    preload = ("torch._dynamo", "unisono.train.exact.run")  # others wait while a rank loads them

    def __init__(
        self, *, most: int, least: int, stall_s: float, job_dir: Path, shows: bool
    ) -> None:
        self.coordinator = Coordinator(most, least)
        self._most, self._least, self._stall_s = most, least, stall_s
        self._job_dir, self._shows = job_dir, shows
        self._ranks: Ranks
        self._candidates: dict[int, Candidate] = {}
        """By rank."""
        self._count = 0
        self._facts: dict[str, Any] = {}
        self._noted: set[int] = set()
        """Numbers of members whose arrival was recorded."""
        self._has_left: set[int] = set()
        """Ranks whose loops have ended."""
        self._retired: dict[int, tuple[RankState, float]] = {}
        """Ranks that were asked to end, and when they are killed."""
        self._is_settled = False
        self._deaths_in_a_row, self._step_of_death = 0, -1
        self._news_at = time.monotonic()
        self._next_look = 0.0

    def start(self, ranks: Ranks) -> None:
        """Remember the ranks, which are about to be started."""
        self._ranks = ranks

    @property
    def step(self) -> int:
        """The step of the furthest member, as far as is known."""
        return max(self.coordinator.step, self.coordinator.reached)

    def resize(self, ranks: int) -> None:
        """Change the number of ranks from the next step on; only in the supervising thread."""
        ranks = max(self._least, min(ranks, self._most))
        self.coordinator.resize(ranks)
        self._say(f"resized to {ranks} ranks")
        self._deliver()
        self.look()

    def settle(self) -> None:
        """Stop replacing ranks: all are about to end."""
        self._is_settled, self.look_s = True, None
        if self.coordinator.phase == "lost":
            self.remark = (
                "  no member is left, and their state with them; max_restarts=1 begins again, "
                "from a checkpoint if the function restores one"
            )

    # Messages of members.

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message of a rank."""
        self._news_at = time.monotonic()
        if message["kind"] == "left":
            self._has_left.add(rank)
        if message["kind"] == "join":
            self._welcome(rank, message)
        elif (candidate := self._candidates.get(rank)) is not None:
            self.coordinator.receive(candidate.number, message)
        self._deliver()

    def _welcome(self, rank: int, message: dict[str, Any]) -> None:
        """Accept a newcomer, unless its results would differ in their bits."""
        self._lose(rank)  # the process that was in its place
        facts: dict[str, Any] = message["facts"]
        self._facts = others = self._facts or facts
        candidate = Candidate(self._count, rank, message["pid"], message["host"])
        if facts != others:
            shown = [
                f"{name}: {facts[name]} on rank {rank}, {others.get(name)} on the others"
                for name in sorted(facts)
                if facts[name] != others.get(name)
            ]
            self._send(candidate, {"kind": "refused", "why": "\n".join(shown)})
            return
        self._count += 1
        self._candidates[rank] = candidate
        place = {name: message[name] for name in ("shards", "step", "address")}
        self.coordinator.joined(candidate.number, rank=rank, **place)

    def _lose(self, rank: int) -> None:
        """Report the end of a process to the coordinator, which reassigns its work."""
        candidate = self._candidates.pop(rank, None)
        if candidate is None:
            return
        number = candidate.number
        member = self.coordinator.members.get(number)
        if member is not None and member.has_left:
            return
        if self.coordinator.phase != "over":
            is_retired = number in self.coordinator.retired
            self._note_event("retired" if is_retired else "died", rank)
        self.coordinator.died(number)
        self._deliver()

    def _deliver(self) -> None:
        """Send the orders of the coordinator, and record new members."""
        by_number = {candidate.number: candidate for candidate in self._candidates.values()}
        for number, order in self.coordinator.take_orders():
            if number in by_number:
                self._send(by_number[number], order)
        for number in self.coordinator.members.keys() & by_number.keys() - self._noted:
            self._noted.add(number)
            self._note_event("joined", by_number[number].rank)

    def _send(self, candidate: Candidate, order: dict[str, Any]) -> None:
        self._ranks.order_rank(candidate.rank, elastic={**order, "pid": candidate.pid})

    # Deaths, stalls and surplus members.

    def look(self) -> None:
        """Handle ranks that have died, are stopped, are missing or are surplus."""
        if self._is_settled:
            return
        if self.coordinator.error is not None:
            self._raise_mistake(self.coordinator.error)
        states = self._ranks.states
        is_over = self.coordinator.phase == "over"
        for state in list(states):
            candidate = self._candidates.get(state.rank)
            is_surplus = candidate is not None and candidate.number in self.coordinator.retired
            is_late = is_over and candidate is None and state.rank not in self._has_left
            if (is_surplus or is_late) and not state.is_over:
                self._retire(state)
            if state.is_good and state.rank not in self._has_left:
                raise PlatformError.because(
                    "unisono.run(..., elastic=True)",
                    f"rank {state.rank} has returned without training: each rank is a world of one",
                    None,
                    "for step in unisono.train.elastic(model, optimizer, data, ...) in the "
                    "function; elastic=False for all other trainings",
                )
        self._forget_dead()
        self._end_retired()
        if any(state.is_bad for state in states):
            self.settle()  # the run ends
            return
        self._bring_to_size()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._end_stalled()

    def _forget_dead(self) -> None:
        """Forget ranks that died; the death of the last member ends the attempt."""
        for state in [state for state in self._ranks.states if state.state == "died"]:
            self._lose(state.rank)
            if self.coordinator.phase not in ("over", "lost"):
                is_new = self.step != self._step_of_death
                self._deaths_in_a_row = 1 if is_new else self._deaths_in_a_row + 1
                self._step_of_death = self.step
            is_last = all(other.is_bad for other in self._ranks.states)
            if is_last or self._deaths_in_a_row > max(8, 4 * self._most):
                continue  # its death is the reason of the end
            self._ranks.forget_rank(state.rank)

    def _retire(self, state: RankState) -> None:
        """Ask a surplus rank to end."""
        if state.rank not in self._retired:
            self._retired[state.rank] = state, time.monotonic() + RETIRE_S
            self._ranks.end_rank(state.rank, at_once=False)

    def _end_retired(self) -> None:
        for rank, (state, kill_at) in list(self._retired.items()):
            if state.exit_code is not None or state.state == "died":
                del self._retired[rank]
                self._lose(rank)
                self._ranks.forget_rank(rank)
            elif time.monotonic() > kill_at:
                self._ranks.end_rank(rank, at_once=True)

    def _bring_to_size(self) -> None:
        """Start the ranks that are missing."""
        states = self._ranks.states
        if self.coordinator.phase in ("over", "lost") or any(state.is_good for state in states):
            return
        occupied = {state.rank for state in states}
        missing = self.coordinator.target - len(occupied)
        for rank in range(self._most):
            if missing > 0 and rank not in occupied and rank not in self._retired:
                self._has_left.discard(rank)
                missing -= self._ranks.start_rank(rank)

    def _end_stalled(self) -> None:
        """End ranks that a signal has stopped, and those for which others have waited too long."""
        if isinstance(self._ranks, RankMonitor):
            for process in self._ranks.kill_stopped():
                self._say(f"rank {process.rank} is ended: it was stopped by a signal")
        quiet_s = time.monotonic() - self._news_at
        if quiet_s <= self._stall_s:
            return
        late = self.coordinator.late()
        for candidate in self._candidates.values():
            if candidate.number in late:
                rank, host = candidate.rank, candidate.host
                self._say(f"rank {rank} on {host} is ended: quiet for {quiet_s:.0f} s")
                self._ranks.end_rank(rank, at_once=True)
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

    def _note_event(self, what: str, rank: int) -> None:
        """Record what happened to a member, for users and for the live page."""
        numbers = {candidate.number for candidate in self._candidates.values()}
        members = len(numbers & self.coordinator.members.keys())
        event = {"what": what, "rank": rank, "step": self.step, "members": members}
        with suppress(OSError), (self._job_dir / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**event, "at": time.time()}) + "\n")
        if what == "died":
            self._say(f"rank {rank} died at step {event['step']}; {members} go on")

    def _say(self, text: str) -> None:
        if self._shows:
            print(f"unisono: {text}", file=sys.stderr, flush=True)


def policy_of(plan: RunPlan, job_dir: Path, *, shows: bool) -> Policy:
    """Return what the end of a rank means in a run."""
    if plan.elastic is None:
        return Policy()
    return ElasticPolicy(most=plan.ranks, **plan.elastic, job_dir=job_dir, shows=shows)


def read_events(job_dir: Path) -> list[dict[str, Any]]:
    """Return the events of the members of a job, the latest last."""
    with suppress(OSError):
        lines = (job_dir / EVENTS).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]
    return []

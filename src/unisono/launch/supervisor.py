"""The one loop that watches a run until all ranks have returned, or something ends them all.

`Ranks` is what differs from place to place: how news of the ranks arrives, and how orders reach
them. Ranks of this host use pipes (`places/local.py`); ranks with agents, here or elsewhere, use
channels (`places/agents.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from unisono.launch.pool import verdict
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import RankState, RunPlan
from unisono.launch.pool.verdict import Ending
from unisono.launch.stopping import announce, first_told_to

_IS_READY, _IS_GOOD, _IS_BAD, _IS_OVER = map(
    attrgetter, ("is_ready", "is_good", "is_bad", "is_over")
)
COLLECT_S = 0.25
"""Time from the first failure until all ranks are stopped: others may report meanwhile."""
CAUSE_S = 1.0
"""The same while ranks only report that another one has gone, whose end is noticed late."""


class Policy:
    """What the end of a rank means: here, the end of all.

    Where ranks may die and join (`launch/elastic/policy.py`), others replace them.
    """

    look_s: float | None = None
    """Longest time between two calls of `look`; None if `look` does nothing."""
    preload: Sequence[str] = ()
    """Modules that the warm server loads before it forks ranks."""
    replaces = False
    """Whether ranks that die are replaced."""
    remark = ""
    """A note for the error of a rank."""

    def start(self, ranks: Ranks) -> None:
        """Remember the ranks, which are about to be started."""

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Handle a message from a rank to the coordinator of an elastic training."""

    def look(self) -> None:
        """Handle ranks that have died, are stopped or are missing."""

    def settle(self) -> None:
        """Stop replacing ranks: all are about to end."""

    def resize(self, ranks: int) -> None:
        """Change the number of ranks."""
        raise NotImplementedError(ranks)

    def close(self) -> None:
        """Release all resources."""


class Ranks(ABC):
    """The ranks of one attempt, as seen by their supervisor."""

    policy: Policy = Policy()
    """What the end of one means."""
    states: list[RankState]
    """What is known of each."""
    has_left = False
    """Whether no process is left that could report about the ranks."""
    exit_code: int | None = None
    """That of the program which started the ranks, if one did."""

    @abstractmethod
    def start(self) -> None:
        """Start them."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Wait for news at most `timeout_s` and handle all of it; return whether there was any."""

    @abstractmethod
    def wake(self) -> None:
        """Make `wait` return soon; from any thread."""

    @abstractmethod
    def interrupt(self, seconds: float) -> None:
        """Ask all ranks to save and end within `seconds`."""

    @abstractmethod
    def finish(self) -> None:
        """Release the ranks that returned; wait until they exit."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Record where unfinished ranks are, and end all ranks."""

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Return the stacks of the ranks that answer."""

    @abstractmethod
    def value(self, rank: int) -> Parcel:
        """Return the packed return value of a rank."""

    @abstractmethod
    def close(self, *, at_once: bool | None) -> None:
        """End what is left of the ranks, and release all resources.

        Args:
            at_once: after an error, whether to kill ranks without a grace period; None if they
                have ended.
        """

    # Where ranks may die and join.

    def order_rank(self, rank: int, **order: Any) -> None:
        """Send one rank an order."""
        raise NotImplementedError

    def start_rank(self, rank: int) -> bool:
        """Start a replacement for a rank that has ended; return whether that is possible."""
        raise NotImplementedError

    def end_rank(self, rank: int, *, at_once: bool) -> None:
        """End a rank that is no longer needed; `at_once` kills it."""
        raise NotImplementedError

    def forget_rank(self, rank: int) -> None:
        """Forget a rank that has ended."""
        raise NotImplementedError

    def is_good(self) -> bool:
        """Whether all have ended well."""
        return bool(self.states) and all(map(_IS_GOOD, self.states))

    def is_bad(self) -> bool:
        """Whether something happened to a rank that ends all."""
        return any(map(_IS_BAD, self.states))


class Supervisor:
    """Watches one attempt from start to end.

    Args:
        ranks: the ranks to watch.
        plan: the deadlines.
        attempt: number of the attempt.
        announces: whether to print what the first Ctrl-C does.
    """

    def __init__(
        self, ranks: Ranks, plan: RunPlan, attempt: int, *, announces: bool = False
    ) -> None:
        self.ranks = ranks
        self._plan = plan
        self._attempt = attempt
        self._announces = announces
        self._questions: deque[Callable[[], None]] = deque()
        self._began = time.monotonic()
        self._ready_at: float | None = None
        self._bad_since: float | None = None
        self._interrupted_until: float | None = None
        self._may_save = False
        self._reason = ""
        self.is_interrupted = False
        """Whether the ranks were asked to end."""

    def ask(self, question: Callable[[], None]) -> None:
        """Call `question` soon in the supervising thread; from any thread."""
        self._questions.append(question)
        self.ranks.wake()

    def interrupt(self) -> None:
        """Ask all ranks to save and end, as Ctrl-C does; only in the supervising thread."""
        if self._interrupted_until is not None:
            return
        self.is_interrupted = True
        self._interrupted_until = time.monotonic() + COLLECT_S  # news of a start may be on the way
        self.ranks.policy.settle()
        self.ranks.interrupt(self._plan.interrupt_s)
        self._look()

    def cancel(self) -> None:
        """Stop all ranks; only in the supervising thread."""
        self._reason = self._reason or "cancelled"

    def run(self) -> Ending:
        """Start the ranks and return when all have ended and nothing of them is left."""
        try:
            if not self._reason:
                self.ranks.policy.start(self.ranks)
                self.ranks.start()
                with first_told_to(lambda: self.ask(self.interrupt)):
                    self._watch()
                self.ranks.policy.settle()
                self.ranks.states.sort(key=attrgetter("rank"))  # replacements came last
                if self._reason:
                    self.ranks.stop(self._reason)
                elif not self.ranks.has_left:
                    self.ranks.finish()
        except BaseException:  # the second Ctrl-C kills them
            self._close(at_once=self.is_interrupted)
            raise
        self._close(at_once=None)
        return self._ending()

    def _close(self, *, at_once: bool | None) -> None:
        self.ranks.policy.settle()
        try:
            self.ranks.close(at_once=at_once)
        finally:
            self.ranks.policy.close()

    def _watch(self) -> None:
        """Watch the ranks until they have returned or left, or must be stopped."""
        policy = self.ranks.policy
        while (remaining_s := self._seconds_left()) != 0.0:
            limits = [seconds for seconds in (remaining_s, policy.look_s) if seconds is not None]
            self.ranks.wait(min(limits, default=None))
            policy.look()
            while self._questions:
                self._questions.popleft()()
            self._look()
            if self._reason or self.ranks.is_good() or self.ranks.has_left:
                return
        self._reason = "deadline" if self._bad_since is None else "another rank failed"
        if self._interrupted_until is not None:
            self._reason = "interrupted"

    def _look(self) -> None:
        """Note when all ranks are ready, when the first one failed, and whether one can save."""
        if self._ready_at is None and all(map(_IS_READY, self.ranks.states)):
            self._ready_at = time.monotonic()
        if self._bad_since is None and self.ranks.is_bad():
            # By our own clock: that of the rank's host may be minutes ahead.
            self._bad_since = time.monotonic()
        if self._interrupted_until is None or self._may_save:
            return
        if any(map(_IS_READY, self.ranks.states)):  # a function runs that could save something
            self._may_save = True
            self._interrupted_until += self._plan.interrupt_s
            if self._announces:
                announce(self._plan.interrupt_s)

    def _seconds_left(self) -> float | None:
        """Return the time until something must be done; None if that depends on the ranks alone.

        A failure and an interrupt are over as soon as all ranks have ended.
        """
        plan = self._plan
        if self._interrupted_until is not None:
            end = self._interrupted_until
        elif self._bad_since is not None:
            has_cause = any(map(verdict.is_own, self.ranks.states))
            end = self._bad_since + (COLLECT_S if has_cause else CAUSE_S)
        elif self._ready_at is None:
            end = self._began + plan.start_timeout_s
        elif plan.timeout_s is None:
            return None
        else:
            end = self._ready_at + plan.timeout_s
        is_urgent = self._interrupted_until is not None or self._bad_since is not None
        if is_urgent and all(map(_IS_OVER, self.ranks.states)):
            return 0.0
        return max(0.0, end - time.monotonic())

    def _ending(self) -> Ending:
        states, plan = self.ranks.states, self._plan
        deadline = ""
        if self._reason == "deadline":  # who failed then was stopped, or saw another one go
            word = "timeout"
            deadline = f"not ready {plan.start_timeout_s:g} s after the start"
            if self._ready_at is not None:
                deadline = f"not done within timeout_s={plan.timeout_s:g}"
        elif self.is_interrupted or self._reason == "cancelled":
            word = "cancelled"
        elif any(map(_IS_BAD, states)) and self.ranks.is_bad():
            word = "failed"
        elif self.ranks.is_good():
            word = "done"
        else:
            word = "lost"
        ready = last = 0.0
        for state in states:
            ready = max(ready, state.at.get("ready", 0.0))
            last = max(last, state.at.get("returned", 0.0))
            if word == "done" and state.state == "requeued":
                word = "requeued"
        return Ending(
            state=word,
            attempt=self._attempt,
            was_ready=self._ready_at is not None,
            start_s=(self._ready_at or time.monotonic()) - self._began,
            wall_s=max(0.0, last - ready),
            exit_code=self.ranks.exit_code,
            deadline=deadline,
        )

"""Watching ranks from their start to their end: one loop over their pipes.

`RankMonitor` is that loop; `Supervisor` watches all ranks of an attempt on this host. The first
failure, or a deadline, ends all of them; whatever happens, leaving its `with` block leaves no
process, descriptor or half-read output behind.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import name_ranks
from unisono.launch.console import Console, RankStream, warn
from unisono.launch.pool import verdict
from unisono.launch.pool.client import RankProcess
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import (
    Address,
    Preempt,
    Ready,
    Standing,
    read_available,
)
from unisono.launch.pool.stacks import StackDumps, user_threads
from unisono.launch.stopping import announce, first_told_to

if TYPE_CHECKING:
    from unisono.launch.platform import Platform

COLLECT_S = 0.25
"""After the first bad news: time in which others may report, before the cause is chosen."""
STACKS_S = 0.2
"""Longest wait for stacks after a failure."""
DEADLINE_STACKS_S = 0.5
"""Longest wait for stacks after a deadline."""
LEAVE_S = 10.0
"""Longest time a rank may take to leave after all have returned; closing a world may take 5 s."""
DRAIN_S = 1.0
"""Longest time to read what ended ranks have left in their pipes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A world in which every rank came to a good end."""

    values: Sequence[Parcel]
    """Return values, by rank."""
    is_requeued: bool
    """Whether the ranks asked for another attempt instead of returning."""
    hosts: Sequence[str]
    """Host of each rank."""
    start_s: float
    """Seconds until the last rank was ready."""
    wall_s: float
    """Seconds from then to the last return."""


class RankMonitor:
    """Reads what ranks say and print, and notes how they end; subclasses may do more.

    Args:
        stack_signal: makes a rank write its stacks.
    """

    def __init__(self, stack_signal: int) -> None:
        self._ranks: list[RankProcess] = []
        self._stack_signal = stack_signal
        self._selector = selectors.DefaultSelector()

    def watch(self, rank: RankProcess) -> None:
        """Begin to listen to a rank that was just started."""
        self._ranks.append(rank)
        self.listen(rank.pipes.report, self.read_report, rank)
        for number, fd in enumerate(rank.pipes.outputs):
            self.listen(fd, self._read_output, rank, number, fd)
        if rank.process.end_fd is not None:
            self.listen(rank.process.end_fd, self._note_end, rank)

    def heard(self, rank: RankProcess, message: Any) -> None:
        """Do what a message of a rank asks for; it is noted already."""

    def printed(self, rank: RankProcess, number: int, data: bytes) -> None:
        """Show what a rank has printed on its stdout (0) or stderr (1); it is in its log."""

    def listen(self, fd: int, callback: Callable[..., bool], *args: object) -> None:
        """Have `callback` called when `fd` has something; it says whether there is more to come."""
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, (callback, args))

    def step(self, timeout_s: float | None) -> bool:
        """Wait for news at most `timeout_s`, take all that has come, say whether there was any."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            callback, args = key.data
            if not callback(*args):
                self._selector.unregister(key.fd)
        return bool(events)

    def step_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Go on until `condition` holds, at most `limit_s`."""
        end = time.monotonic() + limit_s
        while not condition() and (left := end - time.monotonic()) > 0:
            self.step(min(left, 0.02))

    def read_report(self, rank: RankProcess) -> bool:
        """Take the messages of a rank that have come; say whether there may be more."""
        messages = rank.receive()
        for message in messages or ():
            self.heard(rank, message)
        if messages is None and rank.process.end_fd is None:
            self._note_end(rank)  # where the system cannot tell us of an exit in another way
        return messages is not None

    def raw_stacks(self, ranks: Iterable[RankProcess], limit_s: float) -> dict[int, str]:
        """Return the stacks of those `ranks` that answer the stack signal in time."""
        asked = [rank for rank in ranks if rank.is_running and rank.hello]
        dumps = StackDumps({rank.rank: rank.stack_path for rank in asked})
        for rank in asked:
            rank.signal(self._stack_signal)
        self.step_until(dumps.are_whole, limit_s)
        return dumps.texts()

    def wait_for_end(self, ranks: Sequence[RankProcess], limit_s: float) -> None:
        """Wait until these ranks have ended; longer for those that finish a save."""
        begin = time.monotonic()
        while waits := [limit_s + rank.finishing_s for rank in ranks if rank.is_running]:
            if (left := begin + max(waits) - time.monotonic()) <= 0:
                break
            self.step(left)

    def end_all(self, grace_s: float | None) -> None:
        """Ask all ranks to stop, so that their `finally` blocks run, and kill them after `grace_s`.

        None kills them at once. What they have left in their pipes is read.
        """
        running = [rank for rank in self._ranks if rank.is_running]
        try:
            if running and grace_s is not None:
                for rank in running:
                    rank.order(stop=True)
                    rank.signal_group(signal.SIGTERM)
                self.wait_for_end(running, grace_s)
        finally:  # also when a second Ctrl-C interrupts the wait for an orderly end
            for rank in running:
                rank.signal_group(signal.SIGKILL)
            for rank in running:
                if rank.is_running:
                    rank.collect()
            end = time.monotonic() + DRAIN_S
            while time.monotonic() < end and self.step(0):
                pass

    def drop(self, rank: RankProcess) -> None:
        """Listen no more to a rank that has ended, and let its descriptors go."""
        self._ranks.remove(rank)
        for fd in rank.fds:
            with suppress(KeyError):
                self._selector.unregister(fd)
        rank.close()

    def fileno(self) -> int:
        """Return the descriptor that all this listening takes."""
        return self._selector.fileno()

    def close(self) -> None:
        """Let all descriptors go."""
        for rank in self._ranks:
            rank.close()
        self._selector.close()

    def _read_output(self, rank: RankProcess, number: int, fd: int) -> bool:
        data = read_available(fd)
        if data:
            rank.log.write(data)
            self.printed(rank, number, data)
        return data != b""

    def _note_end(self, rank: RankProcess) -> bool:
        """A rank's process has ended: take its last words and its status."""
        if rank.is_running:
            while messages := rank.receive():
                for message in messages:
                    self.heard(rank, message)
            rank.collect()
        return False


class Supervisor(RankMonitor):
    """Watches the ranks of one attempt. Use it as a context manager.

    Args:
        console: where their output is shown.
        platform: what was asked for, with all deadlines but that of the function.
        timeout_s: that of the function.
        job_dir: directory of the run.
        attempt: number of the attempt.
    """

    def __init__(
        self,
        console: Console,
        platform: Platform,
        *,
        timeout_s: float | None,
        job_dir: Path,
        attempt: int,
    ) -> None:
        super().__init__(signal.Signals[platform.stack_signal])
        self._console = console
        self._platform = platform
        self._timeout_s = timeout_s
        self._interrupted_until: float | None = None
        self._is_killed = False
        self._job_dir = job_dir
        self._attempt = attempt
        self._streams: dict[tuple[RankProcess, int], RankStream] = {}
        self._began = time.monotonic()
        self._ready_at: float | None = None
        self._questions: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self.listen(self._wake_read, self._answer_questions)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end_all(None if self._is_killed else self._platform.grace_s)
        finally:
            for stream in self._streams.values():
                stream.close()
            self.close()
            wake_write, self._wake_write = self._wake_write, -1
            os.close(wake_write)
            os.close(self._wake_read)

    @property
    def was_ready(self) -> bool:
        """Whether all ranks have been ready."""
        return self._ready_at is not None

    def ask(self, question: Callable[[], None]) -> None:
        """Have `question` called by the thread that supervises, soon. From any thread."""
        self._questions.append(question)
        with suppress(OSError):  # nobody supervises any more: no answer
            os.write(self._wake_write, b".")

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all ranks that answer; only in the thread that supervises."""
        return self._stacks(self._ranks, DEADLINE_STACKS_S)

    def heard(self, rank: RankProcess, message: Any) -> None:
        """Pass on what is for other ranks."""
        match message:
            case Address():
                for other in self._ranks:
                    if other is not rank:
                        other.order(master=[message.addr, message.port])
            case Ready() if all(other.is_ready for other in self._ranks):
                self._ready_at = time.monotonic()
            case Preempt():
                self._ranks[message.rank].signal(signal.SIGTERM)
            case _:
                pass

    def printed(self, rank: RankProcess, number: int, data: bytes) -> None:
        """Show on the console what a rank has printed."""
        key = rank, number
        if key not in self._streams:
            self._streams[key] = self._console.stream(rank.rank, number)
        self._streams[key].feed(data)

    def _answer_questions(self) -> bool:
        read_available(self._wake_read)
        while self._questions:
            self._questions.popleft()()
        return True

    def until_all_returned(self) -> Outcome:
        """Return when every rank has returned and left; raise if one failed or time ran out."""
        with first_told_to(lambda: self.ask(self._interrupt)):
            while not all(rank.is_done for rank in self._ranks):
                self.step(self._seconds_left())
                if self._interrupted_until is not None:
                    self._await_interrupted()
                    break
                if any(rank.is_bad for rank in self._ranks):
                    raise self._failure()
                if self._seconds_left() == 0.0:
                    raise self._timeout()
        ended = time.monotonic()
        self._dismiss()
        if self._interrupted_until is not None:
            raise KeyboardInterrupt
        ready_at = self._ready_at or ended
        return Outcome(
            values=[value for rank in self._ranks if (value := rank.value()) is not None],
            is_requeued=any(rank.is_requeued for rank in self._ranks),
            hosts=[rank.hello.host for rank in self._ranks if rank.hello],
            start_s=ready_at - self._began,
            wall_s=ended - ready_at,
        )

    def _interrupt(self) -> None:
        """The first Ctrl-C: ask all ranks to end."""
        for rank in self._ranks:
            self.read_report(rank)  # the last may be ready by now
        if self._ready_at is None:  # no function runs that could save anything
            raise KeyboardInterrupt
        if self._console.shows_any:
            announce(self._platform.interrupt_s)
        self._interrupted_until = time.monotonic() + self._platform.interrupt_s
        for rank in self._ranks:
            rank.order(interrupt=self._platform.interrupt_s)

    def _await_interrupted(self) -> None:
        """Let all ranks come to an end; raise `KeyboardInterrupt` unless all have returned."""
        until = self._interrupted_until or 0.0
        self._is_killed = True  # by a second Ctrl-C, from here on
        while not all(rank.is_done or rank.is_bad for rank in self._ranks):
            if (left := until - time.monotonic()) <= 0:
                break
            self.step(left)
        self._is_killed = False
        if all(rank.is_done for rank in self._ranks):
            return
        has_failed = any(fate.is_own for fate in self._fates())
        raise KeyboardInterrupt from (self._failure() if has_failed else None)

    def _seconds_left(self) -> float | None:
        """Return the time to the next deadline; None is for ever, 0.0 is over."""
        if self._ready_at is None:
            end = self._began + self._platform.start_timeout_s
        elif self._timeout_s is None:
            return None
        else:
            end = self._ready_at + self._timeout_s
        return max(0.0, end - time.monotonic())

    def _dismiss(self) -> None:
        """Let all ranks leave; a crash now is worth a warning, the results count."""
        for rank in self._ranks:
            rank.order(finish=True)
        self.wait_for_end(self._ranks, LEAVE_S)
        for rank in self._ranks:
            if rank.lingering:
                names = ", ".join(rank.lingering)
                how = f"left with threads still running: {names} (join them, or daemon=True)"
            elif rank.is_running:
                how = f"did not end within {LEAVE_S:g} s"
            elif rank.exit_code:
                how = verdict.ending(rank.exit_code)
            else:
                continue
            warn(f"rank {rank.rank} returned its result, then {how}")

    def _failure(self) -> Exception:
        """Find out whose fault it is, stop all, and return the error."""
        self.step_until(lambda: all(rank.is_bad for rank in self._ranks), COLLECT_S)
        fates = self._fates()
        unaware = [rank for rank in self._ranks if not rank.is_bad and not rank.is_done]
        stacks = self._stacks(unaware, STACKS_S)
        self.end_all(self._platform.grace_s)
        last_words = [verdict.with_last_words(fate, self._job_dir) for fate in fates]
        job_dir = str(self._job_dir)
        return verdict.failure(last_words, stacks=stacks, job_dir=job_dir, attempt=self._attempt)

    def _timeout(self) -> Exception:
        """Ask every rank where it stands, stop all, and return the error."""
        size = len(self._ranks)
        if self._ready_at is None:
            late = [rank.rank for rank in self._ranks if not rank.is_ready]
            deadline = f"not ready {self._platform.start_timeout_s:g} s after the start"
        else:
            late = [rank.rank for rank in self._ranks if not rank.is_done]
            deadline = f"not done within timeout_s={self._timeout_s:g}"
        standings = self._standings()
        stacks = self._stacks(self._ranks, DEADLINE_STACKS_S)
        fates = self._fates()
        self.end_all(self._platform.grace_s)
        return verdict.timeout(
            fates,
            what=f"{name_ranks(late)} of {size} {deadline}",
            stacks=stacks,
            suspect=verdict.suspect(late, standings, stacks),
            last_collective={rank: standing.call for rank, standing in standings.items()},
            job_dir=str(self._job_dir),
        )

    def _standings(self) -> dict[int, Standing]:
        """Ask the ranks for their latest collectives; return what those that answer say."""
        asked = [rank for rank in self._ranks if rank.is_running and rank.hello]
        for rank in asked:
            rank.standing = None
            rank.order(where=True)
        self.step_until(lambda: all(rank.standing for rank in asked), STACKS_S)
        return {rank.rank: rank.standing for rank in asked if rank.standing is not None}

    def _fates(self) -> list[verdict.Fate]:
        return [
            verdict.Fate(
                rank=rank.rank,
                host=rank.hello.host if rank.hello else socket.gethostname(),
                failed=rank.failed,
                failed_at=rank.failed_at,
                exit_code=None if rank.is_done else rank.exit_code,
                peak_mb=rank.peak_mb,
            )
            for rank in self._ranks
        ]

    def _stacks(self, ranks: Iterable[RankProcess], limit_s: float) -> dict[int, str]:
        dumps = self.raw_stacks(ranks, limit_s)
        return {rank: user_threads(text) for rank, text in dumps.items()}

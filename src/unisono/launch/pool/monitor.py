"""News of ranks of this host over their pipes: messages, output, and how they end.

Each parent of ranks is a `RankMonitor`: the launcher, an agent on another host, the pytest plugin.
Subclasses decide what follows from the news.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

from unisono.launch.logs import FAILED
from unisono.launch.pool.client import RankProcess
from unisono.launch.pool.protocol import RankState, read_available
from unisono.launch.pool.stacks import StackDumps
from unisono.processes import is_stopped

STACKS_S = 0.5
"""Longest wait for the stacks of ranks that are stopped."""
STANDING_S = 0.2
"""Longest wait, after that, for their latest collectives."""
LEAVE_S = 10.0
"""Longest time a rank may take to leave after all have returned; closing a world may take 5 s."""
LONGEST_S = 24 * 3600.0
"""Longest single wait for news."""
DRAIN_S = 1.0
"""Longest time to read what ended ranks have left in their pipes."""

_is_running = attrgetter("is_running")
_finishing_s = attrgetter("state.finishing_s")


class RankMonitor:
    """Reads messages and output of ranks, and records how they end; subclasses may do more.

    Args:
        stack_signal: the signal at which a rank writes its stacks.
    """

    def __init__(self, stack_signal: int) -> None:
        self._ranks: list[RankProcess] = []
        self.states: list[RankState] = []
        """The state of each rank."""
        self._stack_signal = stack_signal
        self._selector = selectors.DefaultSelector()

    def watch(self, rank: RankProcess) -> None:
        """Watch a rank that was just started."""
        self._ranks.append(rank)
        self.states.append(rank.state)
        self.listen(rank.report, self.read_report, rank)
        for number, fd in enumerate(rank.outputs):
            self.listen(fd, self._read_output, rank, number, fd)
        if rank.process.end_fd is not None:
            self.listen(rank.process.end_fd, self._note_end, rank)

    def take_news(self, rank: RankProcess, news: Any) -> None:
        """Handle a message of a rank; its state is updated already."""

    def printed(self, rank: RankProcess, number: int, data: bytes) -> None:
        """Show output of a rank on its stdout (0) or stderr (1); its log has it already."""

    def listen(self, fd: int, callback: Callable[..., bool], *args: object) -> None:
        """Call `callback` when `fd` is readable; it returns whether more may come."""
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, (callback, args))

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for news at most `timeout_s` and handle all of it; return whether there was any."""
        # The system counts milliseconds in 31 bits; a longer wait asks again.
        events = self._selector.select(None if timeout_s is None else min(timeout_s, LONGEST_S))
        for key, _ in events:
            callback, args = key.data
            if not callback(*args):
                self._selector.unregister(key.fd)
        return bool(events)

    def step_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Handle news until `condition` holds, for at most `limit_s`."""
        end = time.monotonic() + limit_s
        while not condition() and (remaining := end - time.monotonic()) > 0:
            self.wait(min(remaining, 0.02))

    def read_report(self, rank: RankProcess) -> bool:
        """Handle the messages of a rank; return whether more may come."""
        messages = self._news(rank)
        if messages is None and rank.process.end_fd is None:
            self._note_end(rank)  # where the system cannot tell us of an exit in another way
        return messages is not None

    def raw_stacks(self, ranks: Iterable[RankProcess], limit_s: float) -> dict[int, str]:
        """Return the stacks of those `ranks` that answer the stack signal in time."""
        queried = [rank for rank in ranks if rank.is_running and "running" in rank.state.at]
        dumps = StackDumps({rank.rank: rank.stack_path for rank in queried})
        for rank in queried:
            rank.signal(self._stack_signal)
        self.step_until(dumps.are_whole, limit_s)
        return dumps.texts()

    def wait_for_end(self, ranks: Sequence[RankProcess], limit_s: float) -> None:
        """Wait until these ranks have ended; longer for those that finish a save."""
        begin = time.monotonic()
        while running := list(filter(_is_running, ranks)):
            longest = max(running, key=_finishing_s).state.finishing_s
            if (remaining_s := begin + limit_s + longest - time.monotonic()) <= 0:
                break
            self.wait(remaining_s)

    def finish(self) -> None:
        """Release the ranks that returned, and wait until they exit; record what goes wrong."""
        for rank in self._ranks:
            rank.order(finish=True)
        self.wait_for_end(self._ranks, LEAVE_S)
        for rank in self._ranks:
            if rank.is_running and not rank.state.warning:
                rank.state.warning = f"did not end within {LEAVE_S:g} s"

    def note_places(self, *, is_deadline: bool) -> None:
        """Record the stacks of unfinished ranks, which are about to be stopped.

        At a deadline also those of ranks that have returned and wait for others, and the latest
        collective of each. That question comes after the stacks: a thread that answers while they
        are written could crash the interpreter.
        """
        queried = [r for r in self._ranks if r.is_running and (is_deadline or not r.state.is_over)]
        for rank in queried:
            if not rank.state.is_over:
                rank.state.note("stopped")
        stacks = self.raw_stacks(queried, STACKS_S)
        for rank in queried:
            rank.state.stack = stacks.get(rank.rank, "")
        if is_deadline:
            for rank in queried:
                rank.order(where=True)
            self.step_until(lambda: all(rank.state.standing for rank in queried), STANDING_S)

    def end_all(self, grace_s: float | None) -> None:
        """Ask all ranks to stop, so that their `finally` blocks run, and kill them after `grace_s`.

        None kills them at once. The rest of their output is read.
        """
        running = list(filter(_is_running, self._ranks))
        try:
            if running and grace_s is not None:
                for rank in running:
                    rank.order(stop=True)
                    rank.signal_group(signal.SIGTERM)
                self.wait_for_end(running, grace_s)
        finally:  # also when a second Ctrl-C interrupts the wait for an orderly end
            for rank in running:
                rank.signal(signal.SIGKILL)  # its group ends behind it
            for rank in running:
                if rank.is_running:
                    rank.collect()
            end = time.monotonic() + DRAIN_S
            while time.monotonic() < end and self.wait(0):
                pass

    def kill_stopped(self) -> list[RankProcess]:
        """Kill and return the ranks that a signal has stopped: others would wait for ever."""
        stopped = [
            rank
            for rank in self._ranks
            if rank.is_running and not rank.state.is_good and is_stopped(rank.pid, or_traced=False)
        ]
        for rank in stopped:
            rank.signal_group(signal.SIGKILL)
        return stopped

    def let_go(self, rank: RankProcess) -> None:
        """End a rank that is no longer needed, read its last output, and forget it."""
        if rank.is_running:
            rank.signal_group(signal.SIGKILL)
            rank.collect()
        for number, fd in enumerate(rank.outputs):
            while data := read_available(fd):
                if rank.log is not None:
                    rank.log.write(data)
                self.printed(rank, number, data)
        self.drop(rank)

    def drop(self, rank: RankProcess) -> None:
        """Stop watching a rank that has ended, and close its descriptors."""
        self._ranks.remove(rank)
        with suppress(ValueError):
            self.states.remove(rank.state)
        for fd in rank.fds:
            with suppress(KeyError):
                self._selector.unregister(fd)
        rank.close()

    def fileno(self) -> int:
        """Return the descriptor of the selector."""
        return self._selector.fileno()

    def close(self) -> None:
        """Close all descriptors."""
        for rank in self._ranks:
            rank.close()
        self._selector.close()

    def _news(self, rank: RankProcess) -> list[Any] | None:
        """Handle and return the new messages of a rank; see `RankProcess.receive`."""
        messages = rank.receive()
        for news in messages or ():
            if isinstance(news, dict) and "failed" in news:
                # One read empties a pipe: output from before the failure precedes it in the log.
                for number, fd in enumerate(rank.outputs):
                    self._read_output(rank, number, fd)
                if rank.log is not None:
                    rank.log.write(FAILED + news["failed"].traceback.encode(errors="replace"))
            self.take_news(rank, news)
        return messages

    def _read_output(self, rank: RankProcess, number: int, fd: int) -> bool:
        data = read_available(fd)
        if data:
            if rank.log is not None:
                rank.log.write(data)
            self.printed(rank, number, data)
        return data != b""

    def _note_end(self, rank: RankProcess) -> bool:
        """Handle the end of a process: read its last messages, and collect its status."""
        if rank.is_running:
            while self._news(rank):
                pass
            rank.collect()
        return False

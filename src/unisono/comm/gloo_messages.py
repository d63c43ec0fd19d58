"""Messages of gloo under way.

gloo cannot be asked whether a message is complete, closes its connections when a wait for one runs
out, and forgets a message whose handle is gone. So each is waited for once: by whoever wants it, or
by a thread where it is only asked for, or where nobody holds it any more.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from unisono.comm import call as calls


class MessageTicket:
    """Messages of one call.

    Args:
        works: what gloo gave for them.
        timeout_s: deadline where somebody asks for them before anybody waits; None: the group's.
    """

    def __init__(self, works: Sequence[dist.Work], timeout_s: float | None = None) -> None:
        self._works = list(works)
        self._timeout_s = timeout_s
        self._is_attended = False
        self._waiter: _Waiter | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait for all messages; raise `TimeoutError` at the deadline."""
        self._is_attended = True
        calls.set_blocked(calls.waited())
        try:
            if self._waiter is None:
                _wait_for(self._works, timeout_s)
            else:
                self._waiter.finish(timeout_s)
        finally:
            calls.set_blocked(None)

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        if not self._works:
            return True
        if self._waiter is None:
            self._waiter = _Waiter(self._works, self._timeout_s)
        return not self._waiter.is_alive()

    def __del__(self) -> None:
        """See that messages arrive which nobody has waited for."""
        is_alone = self._works and not self._is_attended and self._waiter is None
        if is_alone and not sys.is_finalizing():
            _Waiter(self._works, None)


class _Waiter(threading.Thread):
    """Waits for messages in the place of their owner; ends with them."""

    def __init__(self, works: list[dist.Work], timeout_s: float | None) -> None:
        super().__init__(name="unisono-messages", daemon=True)
        self._works = works
        self._timeout_s = timeout_s
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Wait."""
        try:
            _wait_for(self._works, self._timeout_s)
        except Exception as error:  # raised where the owner waits, if it ever does
            self._error = error

    def finish(self, timeout_s: float) -> None:
        """Return, or raise, as a wait for the messages does."""
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError
        if self._error is not None:
            raise self._error


def _wait_for(works: list[dist.Work], timeout_s: float | None) -> None:
    """Wait for all, each taken from the list when it is complete; None: the group's deadline."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while works:
        try:
            if deadline is None:
                works[0].wait()
            else:
                works[0].wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            if "imed out" in str(error):
                raise TimeoutError(str(error)) from None
            raise
        works.pop(0)

"""A loop over descriptors: what a launcher, or the minder of a rank, does all day."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable


class Listener:
    """Calls back when a descriptor has something to read."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def _listen(self, fd: int, callback: Callable[[], bool]) -> None:
        """Have `callback` called for `fd`; it says whether there is more to come."""
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _step(self, timeout_s: float | None) -> bool:
        """Wait for news at most `timeout_s`, take all that has come, say whether there was any."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if not key.data():
                self._selector.unregister(key.fd)
        return bool(events)

    def _step_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Go on until `condition` holds, at most `limit_s`."""
        end = time.monotonic() + limit_s
        while not condition() and (left := end - time.monotonic()) > 0:
            self._step(min(left, 0.02))

"""What the scheduler says of all jobs that this process watches: one question for all of them."""

from __future__ import annotations

import threading
import time

from unisono.errors import PlatformError
from unisono.launch.slurm import commands

SHORTEST_S, LONGEST_S = 1.0, 10.0
"""Seconds between two questions: the longer nothing changes, the rarer they are."""


class Queue:
    """Remembers the last answer of `squeue` for a while. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[str, str]] = {}
        self._asked_at = -float("inf")
        self._pause_s = SHORTEST_S

    def look(self, job: str) -> tuple[str, str] | None:
        """Return state and reason of a job; None once the controller has forgotten it."""
        with self._lock:
            age = time.monotonic() - self._asked_at
            if age > (self._pause_s if job in self._jobs else SHORTEST_S / 2):
                self._ask()
            return self._jobs.get(job)

    def forget(self) -> None:
        """Ask anew next time."""
        with self._lock:
            self._asked_at = -float("inf")
            self._pause_s = SHORTEST_S

    def _ask(self) -> None:
        try:
            jobs = commands.queue_of_user()
        except PlatformError:
            jobs = self._jobs  # the controller is busy or being restarted: what was known holds
        is_new = jobs != self._jobs
        self._pause_s = SHORTEST_S if is_new else min(LONGEST_S, 1.5 * self._pause_s)
        self._jobs, self._asked_at = jobs, time.monotonic()


QUEUE = Queue()

"""A collective under way: what the verbs of `comm.start` return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from unisono.comm.arguments import check_timeout

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of a collective that may still be under way.

    The tensors involved must not be changed before `wait` has returned.
    """

    __slots__ = ("_complete", "_done", "_is_ready", "_value")

    def __init__(self, complete: Callable[[float | None], T], is_ready: Callable[[], bool]) -> None:
        self._complete: Callable[[float | None], T] | None = complete
        self._is_ready = is_ready
        self._done = False
        self._value: T | None = None

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the result is there and return it; `timeout_s` None is the verb's deadline.

        Raises:
            RankTimeout: the deadline passed.
            RankFailed: another rank failed.
        """
        if self._complete is not None:
            if timeout_s is not None:
                check_timeout(timeout_s)
            self._value = self._complete(timeout_s)
            self._complete = None
            self._done = True
        return self._value  # type: ignore[return-value]

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done or self._is_ready()

    @property
    def result(self) -> T:
        """The result; waits for it."""
        return self.wait()

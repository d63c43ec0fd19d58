"""What a non-blocking verb returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from unisono.comm.mpi_style import progress
from unisono.comm.mpi_style.status import Status
from unisono.comm.perform import Pending


class Request:
    """A verb under way; every way to complete it writes the result into the caller's buffer.

    Args:
        is_ready: whether `finish` would not block.
        finish: waits for the end and returns what `Wait` returns; called once.
        status: what to say about the message, for receives.
    """

    def __init__(
        self,
        is_ready: Callable[[], bool],
        finish: Callable[[], Any],
        status: Callable[[Status], None] | None = None,
    ) -> None:
        self._is_ready = is_ready
        self._finish: Callable[[], Any] | None = finish
        self._status = status
        self._value: Any = None

    @classmethod
    def done(cls, value: Any = None) -> Request:
        """Return a request that is complete."""
        request = cls(lambda: True, lambda: None)
        request._finish, request._value = None, value
        return request

    @classmethod
    def of(cls, pending: Pending[Any], deliver: Callable[[Any], None], timeout_s: float) -> Request:
        """Return the request of a collective whose result goes through `deliver`."""

        def finish() -> None:
            progress.drive(pending.done, timeout_s)
            deliver(pending.wait())

        return cls(pending.done, finish)

    def Wait(self, status: Status | None = None) -> Any:
        """Return when the verb is complete; a request of `irecv` returns the object."""
        self._complete()
        if status is not None and self._status is not None:
            self._status(status)
        return self._value

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the verb is complete, without waiting."""
        if self._finish is not None:
            progress.step()
            if not self._is_ready():
                return False
            self._complete()
        if status is not None and self._status is not None:
            self._status(status)
        return True

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            self._value = finish()

    wait = Wait
    test = Test

    @staticmethod
    def Waitall(requests: Iterable[Request]) -> list[Any]:
        """Wait for all `requests`; returns what each of them returns."""
        return [request.Wait() for request in requests]

    waitall = Waitall

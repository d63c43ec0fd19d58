"""What a transport's process group hands to torch.distributed for a call under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from unisono.comm.engines.base import Ticket
from unisono.comm.health import mark_as_news


class TransportWork(Work):
    """A call of a process group: waits, tells errors, and becomes a future when asked.

    C++ callers (DDP, functional collectives) see errors only through `wait` and through the future
    of a callback that raises; a future on which an exception was set crashes them.

    Args:
        tickets: what is under way, in the order in which it ends.
        outputs: tensors the call fills; kept alive until it has ended.
        timeout_s: deadline of `wait` where none is given.
        finish: run once, when everything has ended well.
        report: makes the error to raise of one for a deadline, given the seconds waited.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        outputs: Sequence[Tensor],
        timeout_s: float,
        finish: Callable[[], None],
        report: Callable[[TimeoutError, float], BaseException],
    ) -> None:
        super().__init__()
        self._tickets = tickets
        self._outputs = list(outputs)
        self._timeout_s = timeout_s
        self._finish: Callable[[], None] | None = finish
        self._report = report
        self._finishing = threading.Lock()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises what the call raised, `RankTimeout` after `timeout`."""
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            given = timeout.total_seconds() if timeout is not None else 0.0
            seconds = given if given > 0 else self._timeout_s
            try:
                for ticket in self._tickets:
                    ticket.wait(seconds)
            except TimeoutError as error:
                told = self._report(error, seconds)
                if self._has_ended():  # not only this wait
                    self._error = told
                raise told from None
            except BaseException as error:
                self._error = mark_as_news(error)
                raise
            with self._finishing:
                if self._finish is not None:
                    self._finish()
                    self._finish = None
        return True

    def _has_ended(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, well or badly."""
        if self._finish is not None and self._error is None and self._has_ended():
            self.exception()
        return self._finish is None or self._error is not None

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """Return what the call raised."""
        if self._finish is not None and self._error is None and self._has_ended():
            try:
                self.wait()
            except Exception as error:
                self._error = error
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors the call fills."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs; it fails as the call fails.

        A message has nobody to complete its future later: it is waited for here.
        """
        if self._future is None:
            base: torch.futures.Future[None] = torch.futures.Future()
            self._future = base.then(self._conclude)
            then = getattr(self._tickets[-1], "then", None)
            if then is None:
                base.set_result(None)
            else:
                then(lambda: base.set_result(None))
        return self._future

    def _conclude(self, _: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return the future of the outputs."""
        return self.get_future()

    def _source_rank(self) -> int:
        return getattr(self._tickets[0], "source", -1)

    def source_rank(self) -> int:
        """Return who sent the message (receives from anybody)."""
        return self._source_rank()


class DoneWork(Work):
    """A call that has ended well before it was handed out.

    Args:
        outputs: tensors the call has filled.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Whether the call has ended."""
        return True

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return True

    def result(self) -> list[Tensor]:
        """Return the tensors the call has filled."""
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a complete future of the outputs."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(list(self._outputs))
        return future

"""What a transport's process group hands to torch.distributed for a call under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from unisono.comm.engine import Ticket
from unisono.comm.transports.jobs import Job, JobQueue

_linking = threading.Lock()
_FOREVER_S = threading.TIMEOUT_MAX


class TransportWork(Work):
    """A call of a process group: waits, tells errors, and becomes a future when asked.

    C++ callers (DDP, functional collectives) see errors only through `wait` and through the future
    of a callback that raises; a future on which an exception was set crashes them.

    Args:
        jobs: the group's queue.
        job: the call.
        outputs: tensors the call fills; kept alive until it has ended.
    """

    def __init__(self, jobs: JobQueue, job: Job, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._jobs = jobs
        self._job = job
        self._outputs = list(outputs)
        self._base: list[torch.futures.Future[None]] = []
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises what the call raised, `TimeoutError` after `timeout`."""
        if not self._job.is_done or self._job.error is not None:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            self._jobs.finish(self._job, seconds if seconds > 0 else _FOREVER_S)
        return True

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has ended, well or badly."""
        return self._job.is_done

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self._job.is_done and self._job.error is None

    def exception(self) -> Any:
        """Return what the call raised."""
        return self._job.error

    def result(self) -> list[Tensor]:
        """Return the tensors the call fills."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs; it fails as the call fails."""
        with _linking:
            if self._future is None:
                base: torch.futures.Future[None] = torch.futures.Future()
                self._future = base.then(self._conclude)
                if self._job.is_done:
                    base.set_result(None)
                else:
                    self._base.append(base)
                    self._job.on_done = self._announce
                    if self._job.is_done:  # it ended while these lines ran
                        self._announce(self._job)
            return self._future

    def _announce(self, job: Job) -> None:
        job.on_done = None
        try:
            base = self._base.pop()
        except IndexError:  # the other thread was first
            return
        base.set_result(None)

    def _conclude(self, _: torch.futures.Future[None]) -> list[Tensor]:
        if self._job.error is not None:
            raise self._job.error
        return self._outputs

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return the future of the outputs."""
        return self.get_future()


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


class TicketWork(Work):
    """A message under way, as torch.distributed sees it.

    Args:
        ticket: the message.
        outputs: the tensor it fills or came from.
        timeout_s: deadline of `wait` where none is given.
        finish: run once, in the thread that waits, when the message is there.
        report: makes the error to raise of one for a deadline, given the seconds waited.
    """

    def __init__(
        self,
        ticket: Ticket,
        outputs: Sequence[Tensor],
        timeout_s: float,
        finish: Callable[[], None],
        report: Callable[[TimeoutError, float], BaseException],
    ) -> None:
        super().__init__()
        self._report = report
        self._ticket = ticket
        self._outputs = list(outputs)
        self._timeout_s = timeout_s
        self._finish = finish
        self._is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises what went wrong."""
        if not self._is_over:
            given = timeout.total_seconds() if timeout is not None else 0.0
            seconds = given if given > 0 else self._timeout_s
            try:
                self._ticket.wait(seconds)
            except TimeoutError as error:
                raise self._report(error, seconds) from None
            self._is_over = True
            self._finish()
        return True

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the message has gone or come."""
        if not self._is_over and self._ticket.done():
            self.wait()
        return self._is_over

    def is_success(self) -> bool:
        """Whether the message has gone or come."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """Return the tensor of the message."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensor; waits for it, as nobody is there to complete it later."""
        base: torch.futures.Future[None] = torch.futures.Future()
        future = base.then(self._conclude)
        base.set_result(None)
        return future

    def _conclude(self, _: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return self._outputs

    def _source_rank(self) -> int:
        return getattr(self._ticket, "source", -1)

    def source_rank(self) -> int:
        """Return who sent the message (receives from anybody)."""
        return self._source_rank()

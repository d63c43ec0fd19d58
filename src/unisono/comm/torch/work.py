"""What a transport's process group hands to torch.distributed for a call under way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from unisono import torch_private as private
from unisono.comm.engines.base import Ticket
from unisono.comm.perform import Pending


class TransportWork(Work):
    """A call of a process group: waits, tells errors, and becomes a future when asked.

    C++ callers (DDP, functional collectives) see errors only through `wait` and through the future
    of a callback that raises; a future on which an exception was set crashes them.

    Args:
        pending: the call.
        ticket: what the engine gave for it.
        outputs: tensors the call fills; kept alive until it has ended.
        dropped: where this object goes when Python lets go of it before a wait. C++ may
            still hold its other half (`DDP.join` does), whose `wait` without it would never end.
    """

    def __init__(
        self,
        pending: Pending[Any],
        ticket: Ticket,
        outputs: Sequence[Tensor],
        dropped: deque[TransportWork] | None = None,
    ) -> None:
        super().__init__()
        self._dropped = dropped
        self._pending = pending
        self._ticket = ticket
        self._outputs = list(outputs)
        self._has_ended = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    @private.runs_uncompiled
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raises what the call raised, `RankTimeout` after `timeout`."""
        if self._error is not None:
            raise self._error
        limit_s = timeout.total_seconds() if timeout is not None else 0.0
        try:
            self._pending.wait(limit_s if limit_s > 0 else None)
        except BaseException as error:
            if not isinstance(error, TimeoutError) or self._pending.done():
                self._error = error  # not only of this wait
            raise
        self._has_ended = True
        self._dropped = None
        return True

    def __del__(self) -> None:
        dropped = getattr(self, "_dropped", None)
        if dropped is not None:
            dropped.append(self)

    def let_go(self) -> None:
        """Release the tensors of a call that has ended."""
        if self._outputs and self.is_completed():
            self._outputs = []

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    @private.runs_uncompiled
    def is_completed(self) -> bool:
        """Whether the call has ended, well or badly."""
        self.exception()
        return self._has_ended or self._error is not None

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """Return what the call raised."""
        if not self._has_ended and self._error is None and self._pending.done():
            with contextlib.suppress(Exception):
                self.wait()
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors the call fills."""
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs; it fails as the call fails.

        No thread completes the future of a message later: it is waited for here.
        """
        if self._future is None:
            base: torch.futures.Future[None] = torch.futures.Future()
            self._future = base.then(self._conclude)
            self.at_end(lambda: base.set_result(None))
        return self._future

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the call has ended; at once if it has, or is a message."""
        then = getattr(self._ticket, "then", None)
        if then is None:
            callback()
        else:
            then(callback)

    def _conclude(self, _: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return list(self._outputs)

    get_future_result = get_future

    def _source_rank(self) -> int:
        """Return the sender of the message (receives from any rank)."""
        return getattr(self._ticket, "source", -1)

    source_rank = _source_rank


class DoneWork(TransportWork):
    """A call that has ended well before it was handed out."""

    _has_ended = True
    _error = _future = _ticket = None

    def __init__(
        self, outputs: Sequence[Tensor], dropped: deque[TransportWork] | None = None
    ) -> None:
        Work.__init__(self)
        self._outputs = outputs  # a list, or torch's own
        self._dropped = dropped

    @private.runs_uncompiled
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """Return at once."""
        self._dropped = None
        return True


class AllTickets:
    """Several calls of one group, which end in their order."""

    def __init__(self, tickets: Sequence[Any]) -> None:
        self._tickets = tickets
        self.then = tickets[-1].then

    def wait(self, timeout_s: float) -> None:
        """See `Ticket`."""
        for ticket in self._tickets:
            ticket.wait(timeout_s)

    def done(self) -> bool:
        """See `Ticket`."""
        return all(ticket.done() for ticket in self._tickets)

"""Messages that are MPI's own: any source, any tag, and lengths that the receiver need not know.

MPI is never asked to block: every wait is a loop with a deadline. There is no thread either. MPI
moves data only inside its calls, so a rank that waits in any verb tests its messages meanwhile, and
a receive that was posted before a barrier completes inside the barrier.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.comm import call as calls
from unisono.comm import perform
from unisono.comm.arguments import bytes_of, is_dense
from unisono.comm.call import Call
from unisono.comm.communicator import Communicator
from unisono.comm.engines.mpi.library import load, lock
from unisono.comm.health import failures
from unisono.comm.health.failures import posted_failure
from unisono.comm.mpi_style.constants import is_any_tag
from unisono.comm.mpi_style.messages import Messages, Request, Status
from unisono.errors import UnisonoError

_KINDS = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
"""MPI's names for elements of so many bytes; it counts elements in 32 bits."""
_YIELD_S = 2e-3
"""A wait gives its core away so long before it sleeps."""
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 200e-6
_LOOK_S = 0.5
"""Seconds between two looks for failures of other ranks."""
_LEAVE_S = 5.0
"""Longest time that a process waits at its end for what it has sent."""


class Transfer:
    """A message under way, with the memory that it needs."""

    def __init__(self, mpi: Any, request: Any, values: Tensor) -> None:
        self.request = request
        self.values = values
        self.status = mpi.Status()
        self.is_done = False
        self.error: UnisonoError | None = None
        """Why it has not arrived, and will not."""
        self._mpi = mpi

    def test(self) -> None:
        """Note whether the message has arrived, or why it cannot."""
        try:
            self.is_done = self.request.Test(self.status)
        except self._mpi.Exception as error:
            self.is_done = True
            self.error = UnisonoError.because(
                "a message over MPI",
                str(error),
                None,
                "a buffer for the whole message; Status.Get_count() tells how much came",
            )

    def give_up(self, error: UnisonoError) -> None:
        """Take no message any more; MPI keeps the memory until it says that it has let go of it."""
        self.error = error
        if self.request is not None:
            self.request.Cancel()
        else:
            self.is_done = True


class ObjectReceive(Transfer):
    """A receive of bytes whose number is known once the message is there."""

    def __init__(self, mpi: Any, wire: Any, source: int, tag: int) -> None:
        super().__init__(mpi, None, torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._wire, self._source, self._tag = wire, source, tag

    def test(self) -> None:
        """See `Transfer`."""
        if self.request is None:
            message = self._wire.Improbe(self._source, self._tag, self.status)
            if message is None:
                return
            count = self.status.Get_count(self._mpi.BYTE)
            self.values = torch.empty(count, dtype=torch.uint8, device="cpu")
            self.request = message.Irecv([self.values.numpy(), self._mpi.BYTE])
        super().test()


_under_way: list[Transfer] = []


def _step(lock: Any) -> bool:
    """Test all messages under way; return whether one has arrived."""
    with lock:
        for transfer in _under_way:
            if not transfer.is_done:
                transfer.test()
        left = [transfer for transfer in _under_way if not transfer.is_done]
        has_moved = len(left) < len(_under_way)
        _under_way[:] = left
    perform.meanwhile = _move if left else None
    return has_moved


def _move(is_ready: Callable[[], bool], timeout_s: float) -> None:
    """Move messages on until `is_ready`, none is left, or the deadline has passed.

    Raises:
        RankFailed: another rank has told that it failed.
    """
    now = time.monotonic()
    give_up, next_look = now + timeout_s, now + _LOOK_S
    sleep_from, nap_s = now + _YIELD_S, _FIRST_NAP_S
    while _under_way and not is_ready():
        has_moved, now = _step(lock), time.monotonic()
        if has_moved:
            sleep_from, nap_s = now + _YIELD_S, _FIRST_NAP_S
            continue
        if now > give_up:
            return
        if now > next_look:
            next_look = now + _LOOK_S
            failure = posted_failure()
            if failure is not None:
                raise failure
        if now < sleep_from:
            os.sched_yield()
        else:
            time.sleep(nap_s)
            nap_s = min(nap_s * 1.5, _LAST_NAP_S)


def _flush() -> None:
    """Let what was sent arrive before this process ends, unless it ends with an exception."""
    if getattr(sys, "last_value", None) is None:
        _move(lambda: False, _LEAVE_S)


class MpiMessages(Messages):
    """Messages over a communicator of mpi4py that carries nothing else.

    Args:
        comm: the group.
        wire: the communicator, with the same ranks.
    """

    def __init__(self, comm: Communicator, wire: Any) -> None:
        super().__init__(comm)
        self._mpi = load()
        self._wire = wire
        # Registered when the world is up, so that it runs before the world is closed.
        atexit.unregister(_flush)
        atexit.register(_flush)

    def send(self, x: Tensor, dst: int, tag: int, *, is_sync: bool = False) -> Request:
        """See `Messages`."""
        transfer = self._start(x.cpu(), dst, tag, is_sync=is_sync)
        call = Call("send", self.comm.name, str(self.comm.group_name), sends_to=(dst,))
        return self._request(transfer, call, lambda: None)

    def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """See `Messages`."""
        self._start(self.comm._pickled(obj), dst, tag)

    def _start(self, x: Tensor, dst: int, tag: int, *, is_sync: bool = False) -> Transfer:
        start = self._wire.Issend if is_sync else self._wire.Isend
        with lock:
            request = start(self._described(x), dst, tag)
        return self._track(Transfer(self._mpi, request, x))

    def receive(self, buffer: Tensor | None, source: int | None, tag: int | None) -> Request:
        """See `Messages`."""
        comm, mpi = self.comm, self._mpi
        others = tuple(r for r in range(comm.size) if r != comm.rank and source in (None, r))
        call = Call("recv", comm.name, str(comm.group_name), receives_from=others)
        from_rank = mpi.ANY_SOURCE if source is None else source
        with_tag = mpi.ANY_TAG if tag is None or is_any_tag(tag) else tag
        if buffer is None:
            transfer = ObjectReceive(mpi, self._wire, from_rank, with_tag)
        else:
            room = buffer
            if buffer.device.type != "cpu" or not is_dense(buffer):
                room = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            with lock:
                request = self._wire.Irecv(self._described(room), from_rank, with_tag)
            transfer = Transfer(mpi, request, room)
        self._track(transfer)

        def count() -> int:
            return transfer.status.Get_count(self._kind(1 if buffer is None else buffer.itemsize))

        def deliver() -> Any:
            if buffer is None:
                sender = transfer.status.Get_source()
                return comm._unpickled(transfer.values, [transfer.values.numel()], sender)[0]
            if transfer.values is not buffer:
                _fill(buffer, transfer.values, count())
            return None

        def describe(status: Status) -> None:
            if transfer.is_done and transfer.error is None:
                status.source, status.tag = transfer.status.Get_source(), transfer.status.Get_tag()
                status.count = count()

        return self._request(transfer, call, deliver, describe)

    def _request(
        self,
        transfer: Transfer,
        call: Call,
        deliver: Callable[[], Any],
        describe: Callable[[Status], None] = lambda _: None,
    ) -> Request:
        def is_ready() -> bool:
            _step(lock)
            return transfer.is_done

        def finish() -> Any:
            if transfer.error is None and not transfer.is_done:
                self._wait(transfer, call)
            if transfer.error is not None:
                raise transfer.error
            return deliver()

        return Request(is_ready, finish, describe)

    def _wait(self, transfer: Transfer, call: Call) -> None:
        calls.latest_call = call
        _move(lambda: transfer.is_done, self.comm.timeout_s)
        if not transfer.is_done:
            late = failures.timed_out(call, self.comm.ranks, self.comm.timeout_s)
            if not call.receives_from:
                raise late
            with lock:
                transfer.give_up(late)  # it must not take a later message
        call.done = True

    def _track(self, transfer: Transfer) -> Transfer:
        _under_way.append(transfer)
        _step(lock)
        return transfer

    def _kind(self, itemsize: int) -> Any:
        return getattr(self._mpi, _KINDS[itemsize])

    def _described(self, x: Tensor) -> list[Any]:
        """Return a dense tensor as mpi4py takes buffers."""
        return [bytes_of(x.detach()).numpy(), x.numel(), self._kind(x.itemsize)]


def _fill(buffer: Tensor, values: Tensor, count: int) -> None:
    """Write the first `count` of some values to the first elements of `buffer`."""
    if count == buffer.numel():
        buffer.copy_(values)
        return
    whole = buffer.reshape(-1)
    whole[:count] = values.reshape(-1)[:count]
    if whole.data_ptr() != buffer.data_ptr():
        buffer.copy_(whole.view(buffer.shape))

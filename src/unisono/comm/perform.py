"""The one way every verb goes: number the call, compare it, run it to its deadline, report.

A verb builds a `Transfer`: what it is called, what its kernel does, what becomes of the result.
`perform` runs it now, `start` leaves it under way and hands out a `Pending`.


XXX A collective under way: what the verbs of `comm.start` return.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import distributed_c10d as c10d

from unisono.comm import call as calls
from unisono.comm.arguments import check_timeout, refuse_transformed
from unisono.comm.call import Call, call_site
from unisono.comm.engines.base import Engine, Ticket
from unisono.comm.groups import GroupEntry
from unisono.comm.health import check as checking
from unisono.comm.health import failures
from unisono.comm.health import trace as tracing
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Transfer(Generic[T]):
    """A verb that is ready to run."""

    call: Call
    """What it is, for traces, check mode and reports."""
    kernel: Callable[[bool, float], Ticket | None]
    """`(async_op, timeout_s)`: has the engine do it."""
    finish: Callable[[], T]
    """Returns the result, once the kernel has ended."""
    is_collective: bool = True
    """Whether all ranks of the group take part."""
    verify: Tensor | None = None
    """The tensor whose bits all ranks must share; looked at in check mode."""


class Performer:
    """Base of the verb classes: the state of a communicator, and how a transfer is run."""

    rank: int
    """Own place in the communicator."""
    size: int
    """Number of ranks."""
    ranks: tuple[int, ...]
    """World rank of each place."""
    device: torch.device
    """Where tensors are expected."""
    timeout_s: float
    """Deadline of each wait, in seconds."""
    _entry: GroupEntry
    _engine: Engine
    _closed: bool

    def _perform(self, transfer: Transfer[T], timeout_s: float | None) -> T:
        """Run a transfer and return its result."""
        call, entry, engine = transfer.call, self._entry, self._engine
        deadline = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        is_alive = entry.group is None or entry.group in c10d._world.pg_map or entry.is_alive()
        if self._closed or entry.broken is not None or not is_alive:
            raise self._unusable(call.op)
        entry.calls = call.seq = entry.calls + 1
        calls.latest_call = call
        if tracing.recorder is not None or checking.active:
            self._observe(call, transfer.is_collective, deadline)
        turn = None
        if transfer.is_collective and self.size > 1:
            turn = entry.turn
            if turn is not None:
                if not turn.acquire(blocking=False):
                    raise self._second_thread(call)
                entry.inside = threading.get_ident()
            entry.collectives = call.number = entry.collectives + 1
        recorder = tracing.recorder
        waited = engine.waited_ns if recorder is not None else None
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a third of the price of torch.no_grad()
        try:
            ticket = transfer.kernel(False, deadline)
            if ticket is not None:
                began = time.perf_counter_ns()
                ticket.wait(deadline)
                call.wait_ns = time.perf_counter_ns() - began
            if recorder is not None and waited is not None:
                call.wait_ns = (engine.waited_ns or 0) - waited
            result = transfer.finish()
        except Exception as error:
            told = self._translated(call, error, deadline)
            if told is error:
                raise
            raise told from None
        finally:
            torch._C._set_grad_enabled(grad_mode)
            if turn is not None:
                turn.release()
        call.done = True
        if recorder is not None and call.t_start:
            call.algorithm = engine.last_algorithm
            recorder.add(call, self.ranks[self.rank])
        if checking.active and transfer.verify is not None and self.size > 1:
            self._verify(call, transfer.verify, deadline)
        return result

    def _start(self, transfer: Transfer[T], timeout_s: float | None) -> Pending[T]:
        """Leave a transfer under way; waiting for what it hands out completes it."""
        call, entry = transfer.call, self._entry
        call.is_async = True
        deadline = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        self._begin(call, transfer.is_collective, deadline)
        with self._inside(call, deadline, transfer.is_collective and self.size > 1):
            if transfer.is_collective:
                entry.collectives = call.number = entry.collectives + 1
            ticket = transfer.kernel(True, deadline)

        def complete(own_s: float | None) -> T:
            began = time.perf_counter_ns()
            calls.waited_call = call
            try:
                with torch.no_grad(), self._translating(call, deadline):
                    if ticket is not None:
                        ticket.wait(deadline if own_s is None else own_s)
                    result = transfer.finish()
            finally:
                calls.waited_call = None
            call.wait_ns = time.perf_counter_ns() - began
            call.done = True
            recorder = tracing.recorder
            if recorder is not None and call.t_start:
                call.algorithm = self._engine.last_algorithm
                recorder.add(call, self.ranks[self.rank])
            if checking.active and transfer.verify is not None and self.size > 1:
                self._verify(call, transfer.verify, deadline)
            return result

        return Pending(complete, lambda: ticket is None or ticket.done())

    def _begin(self, call: Call, is_collective: bool, deadline: float) -> None:
        """Begin a call that does not end at once."""
        entry = self._entry
        is_alive = entry.group is None or entry.group in c10d._world.pg_map or entry.is_alive()
        if self._closed or entry.broken is not None or not is_alive:
            raise self._unusable(call.op)
        entry.calls = call.seq = entry.calls + 1
        calls.latest_call = call
        self._observe(call, is_collective, deadline)

    def _observe(self, call: Call, is_collective: bool, deadline: float) -> None:
        """Note a call for the trace; compare it with the other ranks' in check mode."""
        recorder = tracing.recorder
        if recorder is not None:
            call.t_start = time.perf_counter_ns()
            if recorder.call_sites:
                _ = call.site
        if checking.active and is_collective and self.size > 1:
            call.is_checked = True
            with self._translating(call, deadline):
                checking.verify(call, self.rank, self.ranks, deadline)

    def _described(self, op: str, x: Tensor | None, **facts: Any) -> Call:
        """Return the record of a call on `x`, which must be no tensor of a torch.func transform."""
        entry = self._entry
        if x is None:
            return Call(op, entry.name, entry.key, 0, **facts)
        if torch._C._are_functorch_transforms_active():
            refuse_transformed(x, op)
        needs_grad = x.requires_grad
        if needs_grad and x.grad_fn is not None and torch.is_grad_enabled():
            _warn_of_cut(op)
        return Call(
            op, entry.name, entry.key, 0, x.shape, x.dtype, requires_grad=needs_grad, **facts
        )

    @contextlib.contextmanager
    def _inside(self, call: Call, deadline: float, is_taken: bool) -> Iterator[None]:
        """Take the group for this thread; translate what goes wrong inside."""
        turn = self._entry.turn if is_taken else None
        if turn is not None:
            if not turn.acquire(blocking=False):
                raise self._second_thread(call)
            self._entry.inside = threading.get_ident()
        try:
            with torch.no_grad(), self._translating(call, deadline):
                yield
        finally:
            if turn is not None:
                turn.release()

    @contextlib.contextmanager
    def _exchanging(self, op: str, root: int | None, deadline: float) -> Iterator[None]:
        """Report a failure of a small exchange, such as the one before `op`, as one of `op`."""
        entry = self._entry
        is_alive = entry.group is None or entry.group in c10d._world.pg_map or entry.is_alive()
        if self._closed or entry.broken is not None or not is_alive:
            raise self._unusable(op)
        call = Call(op, entry.name, entry.key, 0, root=root)
        calls.waited_call = call
        try:
            with self._inside(call, deadline, True):
                entry.collectives = call.number = entry.collectives + 1
                if torch._C._are_functorch_transforms_active():
                    # What ranks tell each other is no part of a transform around the call.
                    with temporarily_clear_interpreter_stack():
                        yield
                else:
                    yield
        finally:
            calls.waited_call = None

    def _unusable(self, op: str) -> UnisonoError:
        """Return the error of a call on a group that was closed or destroyed, or has failed."""
        entry = self._entry
        if self._closed:
            return UnisonoError.because(
                f"{op} on {entry.name}",
                "this communicator was closed",
                None,
                "ask for a new one: Communicator.of(...) or comm.sub(ranks)",
            )
        first = getattr(self._engine, "cause", None)
        if entry.turn is None and first is not None:
            return self._engine.unusable()  # type: ignore[attr-defined]  # with the first cause
        is_forked = entry.broken is not None and "was forked" in entry.broken
        return UnisonoError.because(
            f"{op} on {entry.name}",
            f"the group is no longer usable: {entry.broken or 'it was destroyed'}",
            None,
            "use the group in the parent, or start processes with 'spawn' or 'forkserver'"
            if is_forked
            else "start the ranks again; a group does not survive a failure",
        )

    def _second_thread(self, call: Call) -> UnisonoError:
        """Return the error of a collective while another thread is inside one of the same group.

        Which of two threads comes first differs from rank to rank: their sums would be mixed up.
        """
        entry = self._entry
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return UnisonoError.because(
            f"{call.op} on {entry.name} in thread {threading.current_thread().name!r}",
            f"thread {names.get(entry.inside, entry.inside)!r} of this rank is inside a collective "
            "of the same group; ranks would not agree on which of the two is first",
            None,
            "a group of its own for the second thread, made before it starts: "
            "Communicator.of(torch.distributed.new_group())",
        )

    @contextlib.contextmanager
    def _translating(self, call: Call, deadline: float) -> Iterator[None]:
        """Turn what a backend raises into `RankTimeout` and `RankFailed`, and mark the group."""
        try:
            yield
        except Exception as error:
            told = self._translated(call, error, deadline)
            if told is error:
                raise
            raise told from None

    def _translated(self, call: Call, error: Exception, deadline: float) -> Exception:
        """Return the error to raise for what a backend raised; the group is marked as broken."""
        if isinstance(error, TimeoutError):
            told = failures.timed_out(call, self.ranks, deadline, error)
            self._entry.broken = f"{call.describe()} timed out"
            return told
        if isinstance(error, RankFailed) or (
            isinstance(error, CollectiveMismatch) and error.returned
        ):
            self._entry.broken = str(error).partition("\n")[0]
            return failures.mark_as_news(error)
        if isinstance(error, UnisonoError) or not failures.tells_of_another(error):
            return error
        lost = failures.connection_lost(call, str(error))
        self._entry.broken = str(lost).partition("\n")[0]
        return lost

    def _verify(self, call: Call, result: Tensor, deadline: float) -> None:
        with self._translating(call, deadline):
            checking.verify_equal_result(call, result, self.rank, self.ranks, deadline)

    def count(self, what: str) -> int:
        """Count one more `what` of this group; ranks that wait for a returned one learn of it.

        Local. Returns the number so far.
        """
        counted = self._entry.counted
        counted[what] = number = counted.get(what, 0) + 1
        return number


_warned_of_cut = False


def _warn_of_cut(op: str) -> None:
    """Say once that a verb has no derivative, where a graph ends in it unnoticed."""
    global _warned_of_cut
    if _warned_of_cut:
        return
    _warned_of_cut = True
    file, _, line = call_site(2).rpartition(":")
    warnings.warn_explicit(
        f"{op} of a tensor that requires grad: verbs have no derivative, so gradients end here. "
        "x.detach() says that this is meant; unisono.operators has the same movements with "
        "derivatives (all_sum_reduce, all_gather, ...)",
        UserWarning,
        file or "?",
        int(line or 0),
    )


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

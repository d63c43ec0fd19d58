"""The one way every verb goes: number the call, compare it, run it to its deadline, report.

A verb is a method that builds a `PreparedCall`: what it is named, what its kernel does, what
becomes of the result. `verb` makes it perform the call now, `started` leaves it under way and hands
out a `Pending`. Calls that torch.distributed makes on our groups go the same way.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.comm import call as calls
from unisono.comm.arguments import check_tensor, check_timeout, refuse_transformed, stored
from unisono.comm.call import Call, call_site
from unisono.comm.engines.base import Engine, Ticket
from unisono.comm.groups import GroupEntry
from unisono.comm.health import check, deadlock, failures, mark_as_news, trace
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")
V = TypeVar("V", bound="Performer")

meanwhile: Callable[[Callable[[], bool], float], None] | None = None
"""What a rank does while it waits: called with whether the wait is over, and its deadline."""

EXCHANGE_TAG = 1 << 20
"""Tag of messages without one of their own, out of the way of the user's."""


@dataclass(slots=True, eq=False)
class PreparedCall(Generic[T]):
    """A verb that is ready to run."""

    call: Call
    """What it is, for traces, check mode and reports."""
    kernel: Callable[..., Any]
    """Takes `async_op` and `timeout_s`, and has the engine do it; returns its ticket, if any."""
    finish: Callable[[], T] | None
    """Returns the result, once the kernel has ended; None: a blocking kernel returns it itself."""
    timeout_s: float | None = None
    """Deadline of this call; None is the communicator's."""
    is_collective: bool = True
    """Whether all ranks of the group take part."""
    is_quiet: bool = False
    """Whether it is part of another call: neither traced nor compared separately."""
    verify: Tensor | None = None
    """The tensor whose bits all ranks must share; looked at in check mode."""

    def then(self, step: Callable[[T], U]) -> PreparedCall[U]:
        """Return the same transfer with a further step after it."""
        finish = cast("Callable[[], T]", self.finish)
        return replace(cast("Any", self), finish=lambda: step(finish()))


class Pending(Generic[T]):
    """The result of a collective that may still be under way.

    The tensors involved must not be changed before `wait` has returned.

    Args:
        performer: whose transfer it is.
        transfer: the transfer; None if there is none, and the result is `value`.
        ticket: what the engine gave for it; None if it is complete.
        deadline: seconds that a wait may last.
        value: a result that is there already.
    """

    __slots__ = (
        *("_deadline", "_finishing", "_is_inference", "_performer", "_ticket", "_transfer"),
        "_value",
    )

    def __init__(
        self,
        performer: Performer,
        transfer: PreparedCall[T] | None,
        ticket: Ticket | None,
        deadline: float,
        value: T | None = None,
    ) -> None:
        self._performer, self._ticket, self._deadline = performer, ticket, deadline
        self._transfer = transfer
        self._value = value
        self._finishing = threading.Lock()  # a callback of torch may wait in another thread
        self._is_inference = torch.is_inference_mode_enabled()

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the result is there and return it; `timeout_s` None is the verb's deadline.

        Raises:
            RankTimeout: the deadline passed.
            RankFailed: another rank failed.
        """
        if self._is_inference and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # outside, what was made inside cannot be written
                return self.wait(timeout_s)
        performer, transfer, ticket = self._performer, self._transfer, self._ticket
        if transfer is None:
            return self._value  # type: ignore[return-value]
        deadline = self._deadline if timeout_s is None else check_timeout(timeout_s)
        began = time.perf_counter_ns()
        calls.waited_call = call = transfer.call
        grad_mode = torch.is_grad_enabled()
        private.set_grad_enabled(False)
        try:
            if ticket is not None:
                if meanwhile is not None:
                    meanwhile(ticket.done, deadline)
                ticket.wait(deadline)
            with self._finishing:
                if self._transfer is not None and transfer.finish is not None:
                    self._value = transfer.finish()
                    self._transfer = self._ticket = None  # and so the tensors it holds
        except Exception as error:
            translated = performer._translated(call, error, deadline)
            if translated is error:
                raise
            raise translated from None
        finally:
            private.set_grad_enabled(grad_mode)
            calls.waited_call = None
        call.wait_ns = time.perf_counter_ns() - began
        call.done = call.done or not call.is_queued
        if trace.recorder is not None or check.active:
            performer._observe_end(transfer, deadline)
        return self._value  # type: ignore[return-value]

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ticket is None or self._ticket.done()


def verb(prepare: Callable[Concatenate[V, P], PreparedCall[T]]) -> Callable[Concatenate[V, P], T]:
    """Let a method that prepares a transfer perform it and return its result."""

    @functools.wraps(prepare)
    def performed(self: V, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._perform(prepare(self, *args, **kwargs))

    # Stacks of a rank that waits name the verb.
    named: Any = performed
    named.__code__ = named.__code__.replace(co_name=prepare.__name__)
    return performed


def started(performed: Callable[Concatenate[V, P], T]) -> Callable[Concatenate[Any, P], Pending[T]]:
    """Return a `verb` as a method of `comm.start`, which leaves its transfer under way."""
    prepare: Callable[..., PreparedCall[T]] = performed.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(prepare)
    def start(self: Any, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return self._comm._perform(prepare(self._comm, *args, **kwargs), True)

    start.__doc__ = f"Start `{prepare.__name__}`."
    return start


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
    _stages: bool
    """Whether tensors that no backend of the group serves go through host memory unasked."""

    @overload
    def _perform(self, transfer: PreparedCall[T]) -> T: ...
    @overload
    def _perform(self, transfer: PreparedCall[T], started: Literal[True]) -> Pending[T]: ...
    def _perform(self, transfer: PreparedCall[T], started: bool = False) -> Any:
        """Run a transfer and return its result; `started`, what waits for it and has it then."""
        call, entry, engine = transfer.call, self._entry, self._engine
        deadline, group = transfer.timeout_s, entry.group
        if deadline is None:
            deadline = self.timeout_s
        elif not (isinstance(deadline, float) and deadline > 0):
            deadline = check_timeout(deadline)
        is_alive = group is None or group in private.known_groups or entry.is_alive()
        if self._closed or entry.broken is not None or not is_alive:
            raise self._unusable(call.op)
        call.is_async = started
        calls.latest_call = call
        turn = None
        if transfer.is_collective:
            if self.size > 1 and (turn := entry.turn) is not None:
                if not turn.acquire(False):
                    raise self._second_thread(call)
                entry.inside = threading.get_ident()
            entry.collectives = call.number = entry.collectives + 1
        recorder = None if transfer.is_quiet else trace.recorder
        is_checked = check.active and not transfer.is_quiet
        waited = engine.waited_ns if recorder is not None else None
        grad_mode = torch.is_grad_enabled()
        private.set_grad_enabled(False)
        try:
            if recorder is not None or is_checked:
                self._observe(call, deadline)
            if transfer.finish is None:
                if private.transforms_active():
                    # What ranks tell each other is no part of a transform around the call.
                    with private.outside_transforms():
                        result = transfer.kernel(timeout_s=deadline)
                else:
                    result = transfer.kernel(timeout_s=deadline)
            else:
                is_async = started or (meanwhile is not None and transfer.is_collective)
                ticket = transfer.kernel(async_op=is_async, timeout_s=deadline)
                if started:
                    return Pending(self, transfer, ticket, deadline)
                if ticket is not None:
                    began = time.perf_counter_ns()
                    if meanwhile is not None and is_async:
                        meanwhile(ticket.done, deadline)
                        calls.latest_call = call
                    ticket.wait(deadline)
                    call.wait_ns = time.perf_counter_ns() - began
                if waited is not None:
                    call.wait_ns = (engine.waited_ns or 0) - waited
                result = transfer.finish()
        except Exception as error:
            translated = self._translated(call, error, deadline)
            if translated is error:
                if entry.collectives == call.number > 0 and not isinstance(error, UnisonoError):
                    entry.collectives -= 1  # not made here: others must not wait for it
                raise
            raise translated from None
        finally:
            private.set_grad_enabled(grad_mode)
            if turn is not None:
                turn.release()
        call.done = call.done or not call.is_queued
        if recorder is not None or is_checked:
            self._observe_end(transfer, deadline)
        return result

    def _observe(self, call: Call, deadline: float) -> None:
        """Note a call for the trace; compare it with the other ranks' in check mode."""
        recorder = trace.recorder
        if recorder is not None:
            call.t_start = time.perf_counter_ns()
            _ = call.site  # which is looked up now
        if check.active and call.number and self.size > 1:
            exchange = self._engine.all_gather_ints
            check.verify(call, self.ranks, deadline, exchange)

    def _observe_end(self, transfer: PreparedCall[Any], deadline: float) -> None:
        """Take down a call that has ended; compare its result in check mode."""
        call, recorder = transfer.call, trace.recorder
        if recorder is not None and call.t_start:
            call.algorithm = self._engine.last_algorithm
            recorder.add(call, self.ranks[self.rank])
        if check.active and transfer.verify is not None and self.size > 1:
            exchange = self._engine.all_gather_ints
            try:
                check.verify_equal_result(call, transfer.verify, self.ranks, deadline, exchange)
            except Exception as error:
                raise self._translated(call, error, deadline) from None

    def _described(self, op: str, x: Tensor | None, kind: str = "", **facts: Any) -> Call:
        """Return the record of a call on `x`, which must be no tensor of a torch.func transform."""
        entry = self._entry
        if x is None:
            return Call(op, entry.name, entry.key, kind=kind, **facts)
        if private.transforms_active():
            refuse_transformed(x, op)
        needs_grad = x.requires_grad
        if needs_grad and x.grad_fn is not None and torch.is_grad_enabled():
            _warn_of_cut(op)
        call = Call(op, entry.name, entry.key, x.shape, x.dtype, kind, **facts)
        call.requires_grad = needs_grad
        call.device = "cpu" if x.is_cpu or not entry.serves(x.device) else x.device.type
        return call

    def _messages(
        self,
        op: str,
        sends: Mapping[int, Tensor],
        recvs: Mapping[int, Tensor],
        tag: int,
        finish: Callable[[], T],
        timeout_s: float | None = None,
        engine: Engine | None = None,
    ) -> PreparedCall[T]:
        """Prepare messages to and from several ranks; empty tensors make none.

        `engine`: that of their device; None: it is looked up, and they are compared.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)  # before anything is counted
        if private.transforms_active():
            for x in sends.values():
                refuse_transformed(x, op)
        entry, ranks = self._entry, self.ranks
        call = Call(op, entry.name, entry.key)
        call.sends_to, call.receives_from = tuple(sends), tuple(recvs)
        outgoing: list[tuple[int, Tensor]] = []
        incoming: list[tuple[int, Tensor]] = []
        if engine is None:
            engine = self._engine_for(self._one_device(op, sends, recvs))
        call.device = engine.device_type
        for peer, x in sends.items():
            if nbytes := x.nbytes:
                outgoing.append((peer, x))
                call.sent += nbytes
                # Counted, so that a message which will never be sent differs from a late one.
                key = ranks[peer], tag
                entry.sent[key] = entry.sent.get(key, 0) + 1
        for peer, x in recvs.items():
            if nbytes := x.nbytes:
                incoming.append((peer, x))
                call.received += nbytes
                key = ranks[peer], tag
                entry.awaited[key] = number = entry.awaited.get(key, 0) + 1
                call.awaits += ((*key, number),)
        kernel = partial(engine.exchange, outgoing, incoming, tag)
        return PreparedCall(call, kernel, finish, timeout_s, is_collective=False)

    def _device_for(self, x: object) -> torch.device:
        """Return where `x` is expected: on the communicator's device, or where `x` is if the group
        has a backend for that, or stages. Verbs in which only some ranks bring a tensor do not ask
        this.
        """
        if not isinstance(x, Tensor) or x.device.type == self.device.type:
            return self.device
        if self._entry.serves(x.device):
            return x.device
        if not self._stages or x.is_meta:
            return self.device
        _warn_of_staging(x.device.type, self._entry.backend(x.device))
        return x.device

    def _engine_for(self, device: torch.device) -> Engine:
        """Return the kernels for tensors on `device`."""
        return self._engine if device.type == self.device.type else self._entry.engine(device)

    def _one_device(
        self, op: str, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]
    ) -> torch.device:
        """Return the device of all messages; refuse several: a backend carries those of one."""
        devices = {x.device: x for side in (sends, recvs) for x in side.values()}
        if len(devices) > 1:
            raise UnisonoError.because(
                f"{op} of messages on different devices",
                ", ".join(sorted(map(str, devices))),
                None,
                "one device for all of them: x.to(device), comm.with_device(x.device)",
            )
        for x in devices.values():
            check_tensor(x, self._device_for(x), op)
        return next(iter(devices), self.device)

    def _post(
        self, sends: Mapping[int, Tensor], recvs: dict[int, Tensor]
    ) -> Pending[dict[int, Tensor]]:
        """Start messages whose peers and sizes follow from a plan: nothing is left to check.

        Args:
            sends: a tensor for each destination, none of them this rank; slices may stay slices.
            recvs: a tensor to fill for each source, or a slice of one; the result.
        """
        if not sends and not recvs:
            return Pending(self, None, None, self.timeout_s, recvs)
        return self._perform(self._planned(sends, recvs), True)

    def _move(self, sends: Mapping[int, Tensor], recvs: dict[int, Tensor]) -> None:
        """Send and receive as `_post` does, and wait."""
        if sends or recvs:
            self._perform(self._planned(sends, recvs))

    def _planned(
        self, sends: Mapping[int, Tensor], recvs: dict[int, Tensor]
    ) -> PreparedCall[dict[int, Tensor]]:
        """Prepare messages of slices, as far as the engine takes them; others are copied."""
        engine, device = self._engine, self.device
        for x in (*sends.values(), *recvs.values()):
            if x.device != device:
                engine = self._engine_for(self._one_device("exchange", sends, recvs))
                break
        moves = engine.moves
        going: dict[int, Tensor] = {}
        for peer, x in sends.items():
            x = stored(x)
            going[peer] = x if x.is_contiguous() or moves(x) else x.contiguous()
        coming = {
            peer: x
            if x.is_contiguous() or moves(x)
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for peer, x in recvs.items()
        }
        copied = [peer for peer, x in recvs.items() if coming[peer] is not x]

        def finish() -> dict[int, Tensor]:
            for peer in copied:
                recvs[peer].copy_(coming[peer])
            return recvs

        return self._messages("exchange", going, coming, EXCHANGE_TAG, finish, engine=engine)

    def all_gather_ints(
        self, values: Sequence[int], *, timeout_s: float | None = None
    ) -> list[tuple[int, ...]]:
        """Return the integers of all ranks, in rank order, on every rank. Collective.

        All ranks bring equally many. The cheapest way to agree on sizes.
        """
        return self._agree("all_gather_ints", values, timeout_s)

    def _agree(
        self,
        op: str,
        values: Sequence[int],
        timeout_s: float | None = None,
        *,
        root: int | None = None,
        is_pollable: bool = False,
    ) -> list[tuple[int, ...]]:
        """Do `all_gather_ints` before the verb `op`, as a part of it.

        Args:
            op: name of the verb.
            values: integers of this rank.
            timeout_s: deadline of the verb.
            root: root of the verb.
            is_pollable: whether other things go on in this wait (`meanwhile`); alike on all ranks.
        """
        call = Call(op, self._entry.name, self._entry.key, root=root)
        if not is_pollable:
            kernel = partial(self._engine.all_gather_ints, values)
            return self._perform(PreparedCall(call, kernel, None, timeout_s, is_quiet=True))
        row = torch.tensor([list(values)], dtype=torch.int64, device="cpu")
        rows = row.new_empty((self.size, row.shape[1]))
        engine = self._engine_for(row.device)
        kernel = partial(engine.all_gather_rows, rows, [1] * self.size, row, alike=0)
        prepared = PreparedCall(call, kernel, rows.tolist, timeout_s, is_quiet=True)
        return [tuple(each) for each in self._perform(prepared)]

    def _unusable(self, op: str) -> UnisonoError:
        """Return the error of a call on a group that was closed or destroyed, or has failed."""
        entry = self._entry
        if entry.verdict is not None and not self._closed:
            return entry.verdict.with_traceback(None)
        problem = f"the group is no longer usable: {entry.broken or 'it was destroyed'}"
        hint = "start the ranks again; a group does not survive a failure"
        if self._closed:
            problem = "this communicator was closed"
            hint = "ask for a new one: Communicator.of(...) or comm.sub(ranks)"
        elif entry.is_forked:
            hint = "use the group in the parent, or start processes with 'spawn' or 'forkserver'"
        return UnisonoError.because(f"{op} on {entry.name}", problem, None, hint)

    def _second_thread(self, call: Call) -> UnisonoError:
        """Return the error of a collective while another thread is inside one of the same group.

        Which of two threads comes first differs from rank to rank: their sums would be mixed up.
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        inside = self._entry.inside
        return UnisonoError.because(
            f"{call.op} on {self._entry.name} in thread {threading.current_thread().name!r}",
            f"thread {names.get(inside, inside)!r} of this rank is inside a collective of the same "
            "group; ranks would not agree on which of the two is first",
            None,
            "a group of its own for the second thread, made before it starts: "
            "Communicator.of(torch.distributed.new_group())",
        )

    def _translated(self, call: Call, error: Exception, deadline: float) -> Exception:
        """Return the error to raise for what a backend raised; the group is marked as broken."""
        if self._entry.verdict is not None:
            return self._entry.verdict
        if isinstance(error, TimeoutError):
            late = failures.timed_out(call, self.ranks, deadline, error)
            self._entry.broken = f"{call.describe()} timed out"
            return late
        is_mismatch = isinstance(error, CollectiveMismatch)
        if is_mismatch and not error.returned and self._entry.is_cause(error, self._engine):
            error = deadlock.explained(error, call, self.ranks)
        elif not isinstance(error, RankFailed) and not (is_mismatch and error.returned):
            if isinstance(error, UnisonoError) or not failures.tells_of_another(error):
                return error
            error = failures.connection_lost(call, str(error))
        self._entry.broken = str(error).partition("\n")[0]
        return mark_as_news(error)

    def count(self, what: str) -> int:
        """Count one more `what` of this group; ranks that wait for a returned one learn of it.

        Local. Returns the number so far.
        """
        counted = self._entry.counted
        counted[what] = number = counted.get(what, 0) + 1
        return number


_warned: set[str] = set()


def _warn_once(subject: str, text: str) -> None:
    if subject not in _warned:
        _warned.add(subject)
        file, _, line = call_site(3).rpartition(":")
        warnings.warn_explicit(text, UserWarning, file or "?", int(line or 0))


def _warn_of_cut(op: str) -> None:
    """Say once that a verb has no derivative, where a graph ends in it unnoticed."""
    _warn_once(
        "cut",
        f"{op} of a tensor that requires grad: verbs have no derivative, so gradients end here. "
        "x.detach() says that this is meant; unisono.operators has the same movements with "
        "derivatives (all_sum_reduce, all_gather, ...)",
    )


def _warn_of_staging(kind: str, backend: str) -> None:
    """Say once that tensors of a device take the long way, although no rank asked for it."""
    _warn_once(
        f"{kind} over {backend}",
        f"tensors on {kind} travel through host memory: this group has {backend} only, and the "
        f"host waits for each. unisono.run(..., on={kind!r}) starts ranks that have a backend for "
        "it, where there is one; comm.with_device(device) says that this is meant",
    )

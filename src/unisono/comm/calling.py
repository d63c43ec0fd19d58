"""What all verbs share: number a call, compare it, run it to its deadline, report what breaks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from unisono.comm import call as calls
from unisono.comm import checking, failures, tracing
from unisono.comm.arguments import (
    check_not_transformed,
    check_rank,
    check_sizes,
    check_timeout,
)
from unisono.comm.call import Call
from unisono.comm.engine import Engine, Ticket
from unisono.comm.groups import GroupEntry
from unisono.comm.headers import learn_blocks, split_evenly
from unisono.comm.pending import Pending
from unisono.errors import CollectiveMismatch, MeshError, PartitionError, RankFailed, UnisonoError

T = TypeVar("T")
Like = Tensor | tuple[Sequence[int], torch.dtype]
"""A tensor to imitate, or its shape and dtype."""

_LOST = ("onnection", "closed", "reset", "roken pipe", "EOF", "abort", "peer")


class Caller:
    """Base of the verb classes: the state of a communicator and how a call is made."""

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

    def _begin(
        self,
        op: str,
        x: Tensor | None,
        *,
        kind: str = "",
        root: int | None = None,
        dim: int | None = None,
        sizes: tuple[int, ...] | None = None,
        recv_sizes: tuple[int, ...] | None = None,
        async_op: bool,
        timeout_s: float | None,
        collective: bool = True,
    ) -> Call:
        """Number the call, remember it, and in check mode compare it with the other ranks'."""
        self._check_usable(op)
        if x is not None:
            check_not_transformed(x, op)
        entry = self._entry
        call = Call(
            op,
            entry.name,
            entry.key,
            entry.next_seq(),
            None if x is None else x.shape,
            None if x is None else x.dtype,
            kind,
            root,
            dim,
            sizes,
            recv_sizes,
            None if x is None else x.requires_grad,
            async_op,
        )
        calls.set_latest(call)
        recorder = tracing.recorder
        if recorder is not None:
            call.t_start = time.perf_counter_ns()
            if recorder.call_sites:
                _ = call.site
        if collective and checking.is_enabled() and self.size > 1:
            call.is_checked = True
            deadline = self._deadline(timeout_s)
            try:
                checking.verify(call, self.rank, self.ranks, deadline)
            except TimeoutError:
                raise failures.timed_out(call, self.ranks, deadline) from None
        return call

    def _check_usable(self, op: str) -> None:
        """Raise where the group was closed or destroyed, has failed, or is a parent process's."""
        entry = self._entry
        if self._closed:
            raise UnisonoError.because(
                f"{op} on {entry.name}",
                "this communicator was closed",
                None,
                "ask for a new one: Communicator.of(...) or comm.sub(ranks)",
            )
        if entry.broken is not None or not entry.is_alive():
            raise UnisonoError.because(
                f"{op} on {entry.name}",
                f"the group is no longer usable: {entry.broken or 'it was destroyed'}",
                None,
                "start the ranks again; a group does not survive a failure",
            )

    def _run(
        self,
        call: Call,
        start: Callable[[], Ticket | None],
        finish: Callable[[], T],
        async_op: bool,
        deadline: float,
        *,
        collective: bool = True,
    ) -> T | Pending[T]:
        """Start the transfer; wait and finish now, or hand out a `Pending` that does."""
        turn = self._enter(call) if collective and self.size > 1 else None
        recorder = tracing.recorder
        waited = self._engine.waited_ns if recorder is not None else None
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a third of the price of torch.no_grad()
        try:
            try:
                ticket = start()
                if not async_op:
                    if ticket is not None:
                        began = time.perf_counter_ns() if recorder is not None else 0
                        ticket.wait(deadline)
                        if recorder is not None:
                            call.wait_ns = time.perf_counter_ns() - began
                    if waited is not None:
                        call.wait_ns = (self._engine.waited_ns or 0) - waited
            except Exception as error:
                told = self._told(call, error, deadline)
                if told is error:
                    raise
                raise told from None
            if not async_op:
                return self._ended(call, finish())
        finally:
            torch._C._set_grad_enabled(grad_mode)
            if turn is not None:
                turn.release()
        return Pending(
            lambda own: self._complete(call, ticket, finish, deadline if own is None else own),
            lambda: ticket is None or ticket.done(),
        )

    def _enter(self, call: Call) -> threading.RLock:
        """Take the group for this thread; refuse while another one is inside a collective of it.

        Which of two threads comes first differs from rank to rank: their sums would be mixed up.
        """
        entry = self._entry
        if entry.turn.acquire(blocking=False):
            entry.inside = threading.get_ident()
            entry.collectives += 1
            call.number = entry.collectives
            return entry.turn
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        raise UnisonoError.because(
            f"{call.op} on {entry.name} in thread {threading.current_thread().name!r}",
            f"thread {names.get(entry.inside, entry.inside)!r} of this rank is inside a collective "
            "of the same group; ranks would not agree on which of the two is first",
            None,
            "a group of its own for the second thread, made before it starts: "
            "Communicator.of(torch.distributed.new_group())",
        )

    def _complete(
        self, call: Call, ticket: Ticket | None, finish: Callable[[], T], deadline: float
    ) -> T:
        """Wait for a transfer that was started before, and finish it."""
        began = time.perf_counter_ns()
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            if ticket is not None:
                calls.set_waited(call)
                try:
                    ticket.wait(deadline)
                except Exception as error:
                    told = self._told(call, error, deadline)
                    if told is error:
                        raise
                    raise told from None
                finally:
                    calls.set_waited(None)
            call.wait_ns = time.perf_counter_ns() - began
            return self._ended(call, finish())
        finally:
            torch._C._set_grad_enabled(grad_mode)

    def _ended(self, call: Call, result: T) -> T:
        """Take down that `call` has ended."""
        call.done = True
        recorder = tracing.recorder
        if recorder is not None and call.t_start:
            call.algorithm = self._engine.last_algorithm
            recorder.add(call, self.ranks[self.rank])
        return result

    @contextlib.contextmanager
    def _translating(self, call: Call, deadline: float) -> Iterator[None]:
        """Turn what a backend raises into `RankTimeout` and `RankFailed`, and mark the group."""
        try:
            yield
        except Exception as error:
            told = self._told(call, error, deadline)
            if told is error:
                raise
            raise told from None

    def _told(self, call: Call, error: Exception, deadline: float) -> Exception:
        """Return the error to raise for what a backend raised; the group is marked as broken."""
        if isinstance(error, TimeoutError):
            told = failures.timed_out(call, self.ranks, deadline, error)
            self._entry.broken = f"{call.describe()} timed out"
            return told
        if isinstance(error, RankFailed):
            self._entry.broken = str(error).partition("\n")[0]
            return error
        if isinstance(error, CollectiveMismatch) and error.returned:
            self._entry.broken = str(error).partition("\n")[0]
            return error
        if isinstance(error, UnisonoError) or not isinstance(error, RuntimeError):
            return error
        if not any(word in str(error) for word in _LOST):
            return error
        lost = failures.connection_lost(call, str(error))
        self._entry.broken = str(lost).partition("\n")[0]
        return lost

    @contextlib.contextmanager
    def _reporting(self, op: str, root: int | None, deadline: float) -> Iterator[None]:
        """Report a failure of the small exchange that precedes `op` as one of `op` itself."""
        self._check_usable(op)
        call = Call(op, self._entry.name, self._entry.key, 0, root=root)
        turn = self._enter(call)
        calls.set_waited(call)
        try:
            # What ranks tell each other is no part of a transform of torch.func around the call.
            with temporarily_clear_interpreter_stack(), self._translating(call, deadline):
                yield
        finally:
            calls.set_waited(None)
            turn.release()

    def count(self, what: str) -> int:
        """Count one more `what` of this group; ranks that wait for a returned one learn of it.

        Local. Returns the number so far.
        """
        counted = self._entry.counted
        counted[what] = number = counted.get(what, 0) + 1
        return number

    def _deadline(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else check_timeout(timeout_s)

    def _verify_result(self, call: Call, result: Tensor, timeout_s: float | None) -> None:
        deadline = self._deadline(timeout_s)
        try:
            checking.verify_equal_result(call, result, self.rank, self.ranks, deadline)
        except TimeoutError:
            raise failures.timed_out(call, self.ranks, deadline) from None

    def _check_peer(self, peer: int, what: str, verb: str) -> None:
        check_rank(peer, self.size, what, verb)
        if peer == self.rank:
            raise MeshError.because(
                f"{verb}({what}={peer})", f"this is rank {peer} itself", None, "copy the tensor"
            )

    def _empty(self, like: Like | None, verb: str) -> Tensor:
        if like is None:
            raise UnisonoError.because(
                f"{verb}(None) on rank {self.rank}",
                "neither a tensor nor like=(shape, dtype) to know what arrives",
                None,
                f"{verb}(None, ..., like=((3, 4), torch.float32))",
            )
        if isinstance(like, Tensor):
            return torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if not isinstance(like, tuple) or len(like) != 2 or not isinstance(like[1], torch.dtype):
            raise UnisonoError.because(
                f"{verb} of something like {like!r}",
                "neither a tensor nor (shape, dtype)",
                None,
                f"{verb}(((3, 4), torch.float32), ...)",
            )
        shape, dtype = like
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def _block_sizes(
        self, sizes: Sequence[int] | None, rows: int, verb: str, what: str = "sizes"
    ) -> tuple[int, ...]:
        if sizes is None:
            return split_evenly(rows, self.size)
        return check_sizes(sizes, self.size, verb, total=rows, what=what)

    def _lengths(
        self,
        rows: Tensor,
        dim: int,
        sizes: Sequence[int] | None,
        verb: str,
        timeout_s: float | None,
    ) -> tuple[int, ...]:
        """Return the block lengths of all ranks: those given, else learned."""
        if sizes is None:
            deadline = self._deadline(timeout_s)
            with self._reporting(verb, None, deadline):
                return learn_blocks(self._engine, rows, dim, verb, self.ranks, deadline)
        given = check_sizes(sizes, self.size, verb)
        if given[self.rank] != rows.shape[0]:
            raise PartitionError.because(
                f"{verb}(sizes={list(given)}) on rank {self.rank}",
                f"this rank's block has {rows.shape[0]} rows",
                f"sizes[{self.rank}] = {given[self.rank]} != {rows.shape[0]}",
            )
        return given


def contiguous(x: Tensor) -> Tensor:
    """Return `x` with its values laid out in order; `x` itself where they are."""
    if x.is_contiguous() and not x.is_conj() and not x.is_neg():
        return x
    return x.resolve_conj().resolve_neg().contiguous()


def detached(x: Tensor) -> Tensor:
    """Return `x` outside of autograd; `x` itself where it takes no part in it."""
    return x.detach() if x.requires_grad else x


def rows_first(x: Tensor, dim: int) -> Tensor:
    """Return `x` detached and contiguous with `dim` in front; a 0-dim tensor is one row."""
    rows = detached(x)
    if rows.dim() == 0:
        rows = rows.reshape(1)
    elif dim:
        rows = rows.movedim(dim, 0)
    return contiguous(rows)


def rows_back(x: Tensor, dim: int) -> Tensor:
    """Undo `rows_first` on a result."""
    return x if dim == 0 else x.movedim(0, dim).contiguous()

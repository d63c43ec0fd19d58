"""Engines of our own transports: they can break, and run calls in one order.

Calls of one group run in the order in which they were issued. A blocking call runs in the caller's
thread when nothing is queued. Asynchronous calls run in one background thread, started by the first
of them. A call issued while another of the same group runs in this thread (from a callback of its
future) runs at once: queueing it would wait for itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from unisono.comm.engines.algorithms import SMALL_BYTES, forced_algorithms
from unisono.comm.engines.base import Blocks, Engine, How, Ticket
from unisono.comm.engines.signature import Signature, sign, sign_blocks
from unisono.comm.reductions import check_op, reduce_among, reduce_in_rank_order
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

_CHORE_S = 1e-3
"""Seconds between two chores of an idle background thread."""
_CLOSE_S = 10.0
"""Longest time to let queued calls end when a group is closed."""


class Job(Future[None]):
    """A call of a queue whose end others can wait for: a `Ticket`."""

    def __init__(self, jobs: JobQueue, call: Callable[[], object]) -> None:
        super().__init__()
        self._jobs = jobs
        self._call: Callable[[], object] | None = call
        self._is_inference = torch.is_inference_mode_enabled()  # of a thread, as the tensors are

    def run(self) -> None:
        """Run the call; its exception is kept for those who wait."""
        call, self._call = self._call, None
        try:
            if call is not None:
                with torch.inference_mode(self._is_inference):
                    call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def wait(self, timeout_s: float) -> None:
        self._jobs.serve(self)
        self.result(min(timeout_s, threading.TIMEOUT_MAX))

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback()` in the thread that ran the job when it has ended; now if it has."""
        self.add_done_callback(lambda _: callback())


class JobQueue:
    """Runs the calls of one group.

    Args:
        name: name of the background thread.
        has_thread: whether there may be one; else an asynchronous call is over when it returns.
    """

    def __init__(self, name: str, *, has_thread: bool = True) -> None:
        self.name = name
        self.in_background = False
        """Whether the call under way runs in the background thread."""
        self.chore: Callable[[], bool] | None = None
        """What an idle background thread does; returns whether it is to be done again."""
        self._has_thread = has_thread
        self._jobs: deque[Job] = deque()
        self._busy = threading.Lock()
        self._runner: int | None = None
        self._thread: threading.Thread | None = None
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(self, call: Callable[[], object]) -> None:
        """Run `call` now, after everything issued before it; raises what it raises."""
        me = threading.get_ident()
        if self._runner == me:
            call()
        elif self._jobs or not self._busy.acquire(blocking=False):
            job = Job(self, call)
            self.post(job)
            job.wait(threading.TIMEOUT_MAX)
        else:
            self._runner = me
            try:
                call()
            finally:
                self._runner = None
                self._busy.release()

    def post(self, job: Job) -> None:
        """Queue `job`, to run when everything issued before it has run."""
        if self._runner == threading.get_ident() or not self._has_thread:
            job.run()
        else:
            self._jobs.append(job)
            self.wake()

    def wake(self) -> None:
        """Let the background thread look for work; starts it."""
        if self._has_thread:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
                self._thread.start()
            self._bell.put(True)

    def serve(self, job: Job) -> None:
        """In the thread that runs calls: run those that are queued up to `job`."""
        while self._runner == threading.get_ident() and self._jobs and not job.done():
            self._jobs.popleft().run()

    def close(self, timeout_s: float) -> bool:
        """End the background thread after what is queued; return whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._bell.put(False)
        thread.join(timeout_s)
        if thread.is_alive():
            return False
        self._thread = None
        return True

    def forget(self) -> None:
        """Drop everything after a fork: the thread and the callers stayed in the parent."""
        self._jobs.clear()
        self._busy = threading.Lock()
        self._runner = None
        self._thread = None

    def _loop(self) -> None:
        goes_on, rest_s = True, None
        while goes_on:
            with contextlib.suppress(queue.Empty):
                goes_on = self._bell.get(timeout=rest_s)
            while self._jobs:
                with self._busy:
                    self._runner, self.in_background = threading.get_ident(), True
                    try:
                        if self._jobs:  # else its caller has served it
                            self._jobs.popleft().run()
                    finally:
                        self._runner, self.in_background = None, False
            rest_s = _CHORE_S if self.chore is not None and self.chore() else None


class TransportEngine(Engine):
    """An engine of ours: it can break, and after the first error every call raises with its cause.

    Args:
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.pid = os.getpid()
        self.is_closed = False
        """Whether this rank has left the group."""
        _engines.add(self)

    def tell_failure(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed."""

    def fail(self, error: BaseException) -> None:
        """See `Engine`; the first cause stays."""
        if self.cause is None:
            self.cause = error
            self.tell_failure(error)

    def culprit(self, error: BaseException) -> int:
        """Return the world rank that is to blame for `error`."""
        rank = getattr(error, "rank", None)
        return rank if isinstance(rank, int) else self.ranks[self.rank]

    def check_usable(self) -> None:
        """See `Engine`: it may be closed, too, or left behind by a fork."""
        if self.cause is not None:
            raise self.unusable()

    def unusable(self) -> UnisonoError:
        cause = self.cause
        text = (
            f"this {self.backend} group of ranks {list(self.ranks)} cannot be used any more\n"
            f"  first cause: {type(cause).__name__}: {cause}"
        )
        if isinstance(cause, RankFailed):
            return RankFailed(text, rank=cause.rank, host=cause.host, traceback=cause.traceback)
        if isinstance(cause, CollectiveMismatch):
            return CollectiveMismatch(text, cause.calls)
        return UnisonoError(text)

    def abandon_after_fork(self) -> None:
        self.cause = UnisonoError(
            f"this process was forked from rank {self.ranks[self.rank]} (process {self.pid}) "
            "after the group was made\n"
            "  HINT: start workers with the 'spawn' or 'forkserver' method, "
            "or use the group in the parent only"
        )

    def close(self) -> None:
        """See `Engine`: let started calls end, then give everything back."""
        if os.getpid() != self.pid or self.is_closed:
            return
        self.is_closed = True
        if self.cause is not None:
            self.cancel("the group is broken")  # nobody will come any more
        if not self.finish_started(_CLOSE_S):
            self.cancel("the group was closed while this call waited")
            self.finish_started(_CLOSE_S)
        if self.cause is None:
            self.cause = UnisonoError("the group was closed by destroy_process_group()")
        self.release()

    @abstractmethod
    def finish_started(self, timeout_s: float) -> bool:
        """Let started calls end; return whether they have within the time."""

    @abstractmethod
    def release(self) -> None:
        """Give everything back; nothing runs any more."""


_engines: weakref.WeakSet[TransportEngine] = weakref.WeakSet()


def living() -> list[TransportEngine]:
    """Return the engines of our own transports in this process."""
    return list(_engines)


def _abandon_after_fork() -> None:
    for engine in living():
        engine.abandon_after_fork()


os.register_at_fork(after_in_child=_abandon_after_fork)


class QueuedEngine(TransportEngine):
    """Runs blocking kernels in the group's order of calls; reductions are made of moves here.

    Args:
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
        jobs: order of calls.
    """

    def __init__(self, rank: int, ranks: Sequence[int], jobs: JobQueue) -> None:
        super().__init__(rank, ranks)
        self.jobs = jobs
        self.timeout_s = 0.0
        """Deadline of each wait of the kernel under way."""

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        check_op(op, x.dtype)
        signature = sign("all_reduce", x.dtype, x.nbytes, op=op)
        return self.call(signature, partial(self._all_reduce, x, op), **how)

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        check_op(op, x.dtype)
        signature = sign("reduce", x.dtype, x.nbytes, op=op, root=dst)
        work = x if self.rank == dst else x.clone()
        return self.call(signature, partial(self._all_reduce, work, op), **how)

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        check_op(op, out.dtype)
        lengths = [block.nbytes for block in ins]
        signature = sign("reduce_scatter", out.dtype, sum(lengths), alike, *lengths, op=op)
        return self.call(signature, partial(self._reduce_scatter, out, ins, op, alike), **how)

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        signature = sign("broadcast", x.dtype, x.nbytes, root=src)
        return self.call(signature, partial(self._broadcast, x, src), **how)

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        lengths = [out.nbytes for out in outs]
        signature = sign("all_gather", x.dtype, sum(lengths), alike, *lengths)
        return self.call(signature, partial(self._all_gather, outs, x, alike), **how)

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> Ticket | None:
        return self.swap_blocks("all_to_all", outs, ins, -1, **how)

    def swap_blocks(
        self, verb: str, outs: Blocks, ins: Blocks, root: int, **how: Unpack[How]
    ) -> Ticket | None:
        signature = sign_blocks(verb, outs, ins, root)
        return self.call(signature, partial(self._all_to_all, outs, ins), **how)

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        return self.call(sign("barrier", torch.uint8, 0), self._barrier, **how)

    # -- the kernels: each does the whole of a call, and waits until `timeout_s` -------------------

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int) -> None: ...

    @abstractmethod
    def _all_gather(self, outs: Blocks, x: Tensor, alike: int = 0) -> None: ...

    @abstractmethod
    def _all_to_all(self, outs: Blocks, ins: Blocks) -> None: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    def _all_reduce(self, x: Tensor, op: str) -> None:
        forced = forced_algorithms().get("all_reduce")
        is_whole = self.fetches_whole(x.nbytes) if forced is None else forced == "all_to_all"
        self.last_algorithm = "all_to_all" if is_whole else "scatter_gather"
        if x.numel():
            swap, place = self._all_to_all, (self.rank, self.size)
            reduce_among(x.view(-1), op, swap, *place, is_whole=is_whole)

    def fetches_whole(self, nbytes: int) -> bool:
        """Whether ranks exchange tensors of this size whole; else each reduces a share."""
        return nbytes <= SMALL_BYTES

    def _reduce_scatter(self, out: Tensor, ins: Blocks, op: str, alike: int) -> None:
        self.last_algorithm = "all_to_all"
        rows = list(out.new_empty(self.size, out.numel()).unbind())
        self._all_to_all(rows, [block.reshape(-1) for block in ins])
        reduce_in_rank_order(out.view(-1), rows, op)

    # -- how they are run -------------------------------------------------------------------------

    def call(
        self, signature: Signature, kernel: Callable[[], Any], **how: Unpack[How]
    ) -> Ticket | None:
        """Run a kernel in the group's order of calls; `signature` says what call it is."""
        run = partial(self._run, signature.verb, kernel, how["timeout_s"])
        if how["async_op"]:
            self.check_usable()
            job = Job(self.jobs, run)
            self.jobs.post(job)
            return job
        self.jobs.run(run)
        return None

    def prepare(self, name: str) -> None:
        """Set up for one kernel; called in the thread that runs it."""

    def _run(self, name: str, kernel: Callable[[], Any], timeout_s: float) -> None:
        self.check_usable()
        self.timeout_s = timeout_s
        self.prepare(name)
        try:
            kernel()
        except BaseException as error:
            self.fail(error)
            raise

    def abandon_after_fork(self) -> None:
        super().abandon_after_fork()
        self.jobs.forget()

    def finish_started(self, timeout_s: float) -> bool:
        return self.jobs.close(timeout_s)

"""Transfers of one group over its communicator: started without waiting, then waited for.

MPI is never asked to block: every wait is a loop of `Test` calls with a deadline. Memory that a
failed transfer may still touch is kept for ever.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.comm.transports.mpi.library import Threads
from unisono.comm.transports.mpi.watch import Vigil, Watch
from unisono.cores import usable_cores
from unisono.errors import CollectiveMismatch, RankFailed, UnisonoError

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 256 * 1024 * 1024
"""Longest stretch that goes in one MPI call; MPI counts bytes in 32 bits."""
MAX_BYTES = 2**31 - 1

_SPINS = 100
_YIELD_S = 2e-3
_YIELD_S_PER_BYTE = 2e-9
"""MPI moves data only inside its calls, so sleep starts when the bytes should have arrived."""
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 200e-6

_LOST = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_PROC_ABORTED", "ERR_REVOKED")

_abandoned: list[Any] = []


def abandon(*things: object) -> None:
    """Keep requests and memory that MPI may still use, to the end of the process."""
    _abandoned.append(things)


class Ladder:
    """One wait, step by step: give the core away, later sleep, and look at the peers.

    Args:
        vigil: looks at the peers.
        nbytes: bytes under way.
    """

    __slots__ = ("_nap_s", "_sleep_from", "_vigil")

    def __init__(self, vigil: Vigil, nbytes: int) -> None:
        self._vigil = vigil
        self._sleep_from = time.perf_counter() + _YIELD_S + nbytes * _YIELD_S_PER_BYTE
        self._nap_s = _FIRST_NAP_S

    def step(self) -> None:
        """Let some time pass."""
        if time.perf_counter() < self._sleep_from:
            os.sched_yield()
        else:
            time.sleep(self._nap_s)
            self._nap_s = min(self._nap_s * 1.5, _LAST_NAP_S)
        self._vigil.look()


class Line:
    """Starts transfers of one group and waits for them; one kernel at a time.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: communicator of the group.
        threads: what threads may do.
        watch: judges the peers.
        tag: tag of blocks that travel beside a collective.
    """

    def __init__(
        self, mpi: Any, comm: MPI.Intracomm, threads: Threads, watch: Watch, tag: int
    ) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.threads = threads
        self.watch = watch
        self.chunk_bytes = CHUNK_BYTES
        self.timeout_s = 600.0
        """Deadline of each wait."""
        self.behind = False
        """Whether the kernel runs beside the thread that computes."""
        self.waited_ns = 0
        """Time spent in waits so far."""
        self._tag = tag
        self._spins = _SPINS if self.size <= usable_cores() else 2
        self._open: list[Any] = []
        self._held: list[Tensor] = []
        self._nbytes = 0

    def memory(self, x: Tensor, begin: int = 0, nbytes: int | None = None) -> Any:
        """Return bytes of a contiguous tensor as MPI takes them; `x` lives until `finish`."""
        length = x.numel() * x.element_size() - begin if nbytes is None else nbytes
        self._held.append(x)
        self._nbytes += length
        return self.mpi.buffer.fromaddress(x.data_ptr() + begin, length)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors live until `finish`."""
        self._held.extend(tensors)

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield begin and length of the stretches in which `nbytes` bytes travel."""
        for begin in range(0, nbytes, self.chunk_bytes):
            yield begin, min(self.chunk_bytes, nbytes - begin)

    def start(self, call: Callable[..., Any], *args: Any) -> None:
        """Start a non-blocking MPI call."""
        with self.threads.lock:
            self._open.append(call(*args))

    def send_alone(self, x: Tensor, dst: int) -> None:
        """Start to send a large block beside the collective."""
        for begin, length in self.pieces(x.numel() * x.element_size()):
            block = [self.memory(x, begin, length), self.mpi.BYTE]
            self.start(self.comm.Isend, block, dst, self._tag)

    def receive_alone(self, x: Tensor, src: int) -> None:
        """Start to receive a large block beside the collective."""
        for begin, length in self.pieces(x.numel() * x.element_size()):
            block = [self.memory(x, begin, length), self.mpi.BYTE]
            self.start(self.comm.Irecv, block, src, self._tag)

    def finish(self) -> None:
        """Wait for everything that was started."""
        requests, lock = self._open, self.threads.lock
        spins = 0 if self.behind else self._spins
        while requests:
            with lock:
                done = requests[-1].Test()
            if done:
                requests.pop()
            elif spins > 0:
                spins -= 1
            else:
                self._wait(requests)
        self._held.clear()
        self._nbytes = 0

    def _wait(self, requests: list[Any]) -> None:
        before, lock = time.perf_counter_ns(), self.threads.lock
        ladder = Ladder(self.watch.begin(self.timeout_s), self._nbytes)
        while requests:
            with lock:
                done = requests[-1].Test()
            if done:
                requests.pop()
            else:
                ladder.step()
        self.waited_ns += time.perf_counter_ns() - before

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Run one kernel: errors of MPI become ours, and what is left open is kept alive."""
        try:
            yield
        except BaseException as error:
            abandon(self._open, self._held)
            self._open, self._held, self._nbytes = [], [], 0
            if isinstance(error, self.mpi.Exception):
                raise self.translated(error) from error
            raise

    def translated(self, error: Any) -> UnisonoError:
        """Return our error for one of MPI."""
        mpi, me = self.mpi, self.watch.me
        kind, words = error.Get_error_class(), error.Get_error_string().strip()
        start = f"{self.watch.doing} on rank {me}"
        if kind == mpi.ERR_TRUNCATE:
            return CollectiveMismatch(
                f"{start}: another rank has sent more bytes than this one expects\n"
                f"  MPI says: {words}\n"
                "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree"
            )
        if kind in [getattr(mpi, name, None) for name in _LOST]:
            return RankFailed(
                f"{start} broke off: another rank of the group has gone\n  MPI says: {words}"
            )
        return UnisonoError(f"{start} failed\n  MPI says: {words} (class {kind})")

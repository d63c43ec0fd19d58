"""The communicator of one group: waits that always end, and the order of its calls.

MPI is never asked to block: every wait is a loop of `Test` calls with a deadline, which looks for
dead, failed and departed peers now and then. Ranks tell each other of failures through the store,
as with every transport; that they leave, over MPI itself, for only then can the communicator be
freed. Memory that a failed transfer may still touch is kept for ever.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.engines.rendezvous import Member
from unisono.comm.engines.transport import Watch
from unisono.comm.health import failures, watchdog
from unisono.cores import usable_cores
from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout, UnisonoError

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 256 * 1024 * 1024
"""Longest stretch of memory that one part of a datatype describes; MPI counts in 32 bits."""
PEERS_S = 0.05
"""Seconds between two looks at the peers."""
STORE_S = 0.25
"""Seconds between two looks at the store."""
GONE_S = 1.0
"""What a rank sent before it left arrives within this time."""

_SPINS = 100
_YIELD_S = 2e-3
_YIELD_S_PER_BYTE = 2e-9
"""MPI moves data only inside its calls, so sleep starts when the bytes should have arrived."""
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 200e-6
_IDLE_S = 1e-3
"""Seconds between two looks of an idle thread at messages under way."""
_TEXT_LIMIT = 6000
"""Longer reports, in characters, lose their middle."""
_LOST = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_PROC_ABORTED", "ERR_REVOKED")

_abandoned: list[Any] = []


def abandon(*things: object) -> None:
    """Keep requests and memory that MPI may still use, to the end of the process."""
    _abandoned.append(things)


class MpiWatch(Watch):
    """Knows what ranks have said in the store, and who has left.

    Args:
        ranks: world ranks of the group.
        rank: own rank in the group.
        members: what the ranks report about themselves.
        name: name of the group.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, members: Sequence[Member], name: str
    ) -> None:
        here = members[rank].card[0]
        cards = [member.card for member in members]
        processes = [(pid, started) if host == here else None for host, pid, started in cards]
        super().__init__(rank, ranks, processes)
        self.doing = "set-up"
        """Name of the call under way, for messages."""
        self.number = 0
        """Number of the latest collective."""
        self.gone: dict[int, int] = {}
        """Ranks of the group that have left it, with the collectives they have made."""
        self.gone_since: float | None = None
        """When the wait under way has met a rank that has left too early."""
        self._name = name
        self.token = members[0].nonce
        """Names the group in the store."""
        self._ask_news = 0.0

    def _dog(self) -> watchdog.Watchdog | None:
        """Return who speaks with the store; None where it has gone, and the deadline remains."""
        with contextlib.suppress(RuntimeError):
            return watchdog.serving(self._name)
        return None

    def tell(self, error: BaseException, culprit: int) -> None:
        """Tell the other ranks of the group that this one has failed in it."""
        dog = self._dog()
        if dog is None or isinstance(error, RankFailed):
            return  # the others learn of it as this rank did
        text = failures.text_of(error)
        if len(text) > _TEXT_LIMIT:
            text = f"{text[: _TEXT_LIMIT // 2]}\n[...]\n{text[-_TEXT_LIMIT // 2 :]}"
        report = {"teller": self.me, "culprit": culprit, "host": self.host, "text": text}
        gave_up_in = self.number if isinstance(error, RankTimeout) else None
        mismatch = [str(error), error.calls] if isinstance(error, CollectiveMismatch) else None
        news = {
            "broken": self.token,
            "gave_up_in": gave_up_in,
            "mismatch": mismatch,
            "report": report,
        }
        dog.publish(news)

    def hear(self, doing: str, missing: Sequence[int] | None) -> None:
        now = time.monotonic()
        if now >= self._ask_news:
            self._ask_news = now + STORE_S
            self._hear_news(doing)
        gone = self.departed(missing)
        if gone and self.gone_since is None:
            self.gone_since = now
        elif gone and self.gone_since is not None and now > self.gone_since + GONE_S:
            raise failures.peer_left(doing, self.me, gone)

    def _hear_news(self, doing: str) -> None:
        dog = self._dog()
        for item in dog.news() if dog is not None else []:
            if item.get("broken") != self.token or item["report"]["teller"] == self.me:
                continue
            if item["mismatch"] is not None:  # is seen by one rank first, and true of all
                text, made = item["mismatch"]
                raise CollectiveMismatch(text, {int(rank): call for rank, call in made.items()})
            if item["gave_up_in"] is None:
                raise failures.peer_failed(doing, self.me, **item["report"])
            # Ranks that wait in one collective have their own deadlines for it.
            if item["gave_up_in"] != self.number:
                raise failures.peer_gave_up(doing, self.me, **item["report"])

    def departed(self, peers: Sequence[int] | None) -> list[int]:
        """Return the world ranks that have left the group before they came to this call.

        A rank that has made the collective may leave while others are still busy with it.
        """
        late = [
            place
            for place, made in self.gone.items()
            if (made < self.number if peers is None else place in peers)
        ]
        return sorted(self.ranks[place] for place in late)


class Channel:
    """What calls of one group need of MPI: datatypes, waits, errors and goodbyes.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: communicator of the group.
        watch: judges the peers.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, watch: MpiWatch) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.watch = watch
        self.chunk_bytes = CHUNK_BYTES
        self.waited_ns = 0
        """Time spent in waits so far."""
        self._goodbye_tag = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
        self.tags = self._goodbye_tag - 1
        """How many tags messages can have; the last but one is that of `exchange`."""
        self._spins = _SPINS if self.size <= usable_cores() else 2
        self._goodbyes: list[Any] = []

    def kind(self, *memory: tuple[int, int]) -> MPI.Datatype:
        """Return a datatype that holds addresses and lengths: memory from anywhere, of any size.

        It can be freed as soon as the transfer has begun: MPI keeps it until that has ended.
        """
        places: list[int] = []
        lengths: list[int] = []
        for at, nbytes in memory:
            for begin in range(0, nbytes, self.chunk_bytes):
                places.append(at + begin)
                lengths.append(min(self.chunk_bytes, nbytes - begin))
        return self.mpi.BYTE.Create_hindexed(lengths, places).Commit()

    def until(
        self,
        is_over: Callable[[], bool],
        timeout_s: float,
        nbytes: int = 0,
        peers: Sequence[int] | None = None,
    ) -> None:
        """Return when `is_over()`: give the core away meanwhile, look at the peers and the clock.

        Args:
            is_over: moves transfers on, and returns whether they have ended.
            timeout_s: deadline of the wait.
            nbytes: bytes under way.
            peers: the ranks that are waited for; None is the whole group.

        Raises:
            RankFailed: a rank that is waited for has failed, died or left.
            RankTimeout: the deadline has passed.
            CollectiveMismatch: ranks wait in different calls.
        """
        for _ in range(self._spins):
            if is_over():
                return
        watch, began = self.watch, time.monotonic()
        watch.gone_since = None
        sleep_from = began + _YIELD_S + nbytes * _YIELD_S_PER_BYTE
        look, nap_s = began + min(PEERS_S, timeout_s / 2), _FIRST_NAP_S
        try:
            while not is_over():
                now = time.monotonic()
                if now < sleep_from:
                    os.sched_yield()
                else:
                    time.sleep(nap_s)
                    nap_s = min(nap_s * 1.5, _LAST_NAP_S)
                if now >= look:
                    look = min(now + PEERS_S, began + timeout_s)
                    watch.look(watch.doing, peers, now - began, timeout_s)
                    self.hear_goodbyes()
        finally:
            self.waited_ns += int((time.monotonic() - began) * 1e9)

    def say_goodbye(self) -> None:
        """Tell the other ranks that this one leaves, with its number of collectives."""
        made = str(self.watch.number).encode()
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(self.mpi.Exception):
                    block = [made, self.mpi.BYTE]
                    self._goodbyes.append(self.comm.Isend(block, peer, self._goodbye_tag))

    def hear_goodbyes(self) -> None:
        """Take down the ranks that have left the group so far."""
        mpi, status = self.mpi, self.mpi.Status()
        while message := self.comm.Improbe(mpi.ANY_SOURCE, self._goodbye_tag, status):
            room = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([room, mpi.BYTE])
            self.watch.gone[status.Get_source()] = int(room)

    def have_all_left(self) -> bool:
        """Whether all other ranks have said that they leave, and know that this one does."""
        self.hear_goodbyes()
        return self.mpi.Request.Testall(self._goodbyes) and len(self.watch.gone) == self.size - 1

    def translated(self, error: Any) -> UnisonoError:
        """Return our error for one of MPI."""
        mpi, me = self.mpi, self.watch.me
        kind, text = error.Get_error_class(), error.Get_error_string().strip()
        start = f"{self.watch.doing} on rank {me}"
        if kind == mpi.ERR_TRUNCATE:
            return CollectiveMismatch(
                f"{start}: another rank has sent more bytes than this one expects\n"
                f"  MPI says: {text}\n"
                "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree"
            )
        if kind in [getattr(mpi, name, None) for name in _LOST]:
            return RankFailed(
                f"{start} broke off: another rank of the group has gone\n  MPI says: {text}"
            )
        return UnisonoError(f"{start} failed\n  MPI says: {text} (class {kind})")


class QueuedCall(Future[None]):
    """A started call whose end others can wait for: a `Ticket`."""

    def __init__(self, queue: CallQueue, call: Callable[[], object]) -> None:
        super().__init__()
        self._queue = queue
        self._call: Callable[[], object] | None = call
        self._is_inference = torch.is_inference_mode_enabled()  # of a thread, as the tensors are

    def run(self) -> None:
        """Run the call; its exception is kept for those who wait."""
        call, self._call = self._call, None
        try:
            if call is not None:
                with torch.inference_mode(self._is_inference), torch.no_grad():
                    call()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def wait(self, timeout_s: float) -> None:
        self.result(min(timeout_s, threading.TIMEOUT_MAX))

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback()` now if this call has ended, else behind all that were started before.

        So what it calls comes behind those calls on all ranks, the fast and the slow.
        """
        queued = self if self.done() else self._queue.latest_for(self)
        queued.add_done_callback(lambda _: callback())


class CallQueue:
    """Runs the calls of one group in the order in which they were issued.

    A blocking call runs in the caller's thread when nothing is under way, a started one in a thread
    of the group, which the first of them starts. A call issued inside of another one in the same
    thread (from a callback of its future) runs at once: behind it, it would wait for itself.

    Args:
        name: name of the thread.
        idle: what the thread does now and then, once woken; returns whether it is to go on.
    """

    def __init__(self, name: str, idle: Callable[[], bool] = lambda: False) -> None:
        self._name = name
        self._idle = idle
        self._queued: deque[QueuedCall | None] = deque()
        self._latest: QueuedCall | None = None
        """The call that was started last."""
        self._busy = threading.Lock()
        self._runner: int | None = None
        self._thread: threading.Thread | None = None
        self._bell = threading.Semaphore(0)

    def run(self, call: Callable[[], object]) -> None:
        """Run `call` now, after everything issued before it; raises what it raises."""
        if self._runner == threading.get_ident():
            call()
        elif self._queued or not self._busy.acquire(blocking=False):
            self.start(call).wait(threading.TIMEOUT_MAX)
        else:
            self._runner = threading.get_ident()
            try:
                call()
            finally:
                self._runner = None
                self._busy.release()

    def start(self, call: Callable[[], object]) -> QueuedCall:
        """Have `call` run when everything issued before it has run."""
        queued = QueuedCall(self, call)
        if self._runner == threading.get_ident():
            queued.run()
            return queued
        self._latest = queued
        self._queued.append(queued)
        self.wake()
        return queued

    def wake(self) -> None:
        """Have the thread look for work; starts it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._bell.release()

    def latest_for(self, queued: QueuedCall) -> QueuedCall:
        """Return the call that was started last; inside a call, where all run at once, `queued`."""
        return queued if self._runner == threading.get_ident() or not self._latest else self._latest

    def close(self, timeout_s: float) -> bool:
        """End the thread after what was started; return whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        self._queued.append(None)
        self._bell.release()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _loop(self) -> None:
        rest_s = None
        while True:
            self._bell.acquire(timeout=rest_s)
            with self._busy:
                if self._queued:
                    if (queued := self._queued.popleft()) is None:
                        return
                    self._runner = threading.get_ident()
                    queued.run()
                    self._runner = None
            rest_s = _IDLE_S if self._idle() else None

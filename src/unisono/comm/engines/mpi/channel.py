"""The communicator of one group: transfers started without waiting, and waits that always end.

MPI is never asked to block: every wait is a loop of `Test` calls with a deadline, which looks for
dead, failed and departed peers now and then. Ranks tell each other of failures through the store,
as with every transport; that they leave, over MPI itself, for only then can the communicator be
freed. Memory that a failed transfer may still touch is kept for ever.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.comm.engines.mpi.library import Threads
from unisono.comm.engines.shm.rendezvous import Member
from unisono.comm.engines.transport import Watch
from unisono.comm.health import failures, watchdog
from unisono.comm.perform import EXCHANGE_TAG
from unisono.cores import usable_cores
from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout, UnisonoError

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 256 * 1024 * 1024
"""Longest stretch that goes in one MPI call; MPI counts bytes in 32 bits."""
MAX_BYTES = 2**31 - 1
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


class Wait:
    """One wait, step by step: give the core away, later sleep; look at the peers and the clock.

    Args:
        watch: judges the peers.
        timeout_s: deadline of the wait.
        nbytes: bytes under way.
        peers: the ranks that are waited for; None is the whole group.
    """

    def __init__(
        self, watch: MpiWatch, timeout_s: float, nbytes: int = 0, peers: Sequence[int] | None = None
    ) -> None:
        self._began = now = time.monotonic()
        self._watch = watch
        self._peers = peers
        self._timeout_s = timeout_s
        self._sleep_from = now + _YIELD_S + nbytes * _YIELD_S_PER_BYTE
        self._nap_s = _FIRST_NAP_S
        self._look = now + min(PEERS_S, timeout_s / 2)
        watch.gone_since = None

    def step(self) -> bool:
        """Let some time pass; return whether it was time to look at the peers.

        Raises:
            RankFailed: a rank that is waited for has failed, died or left.
            RankTimeout: the deadline has passed.
            CollectiveMismatch: ranks wait in different calls.
        """
        now = time.monotonic()
        if now < self._sleep_from:
            os.sched_yield()
        else:
            time.sleep(self._nap_s)
            self._nap_s = min(self._nap_s * 1.5, _LAST_NAP_S)
        if now < self._look:
            return False
        self._look = min(now + PEERS_S, self._began + self._timeout_s)
        self._watch.look(self._watch.doing, self._peers, now - self._began, self._timeout_s)
        return True


class Channel:
    """Starts transfers of one group and waits for them; one kernel at a time.

    Args:
        mpi: the module `mpi4py.MPI`.
        comm: communicator of the group.
        threads: what threads may do.
        watch: judges the peers.
    """

    def __init__(self, mpi: Any, comm: MPI.Intracomm, threads: Threads, watch: MpiWatch) -> None:
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
        self.max_tag = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB))
        """Largest tag of this MPI, which says goodbye."""
        self.tags = self.max_tag - 1
        """How many tags messages can have; the last but one is that of `exchange`."""
        self._spins = _SPINS if self.size <= usable_cores() else 2
        self._open: list[Any] = []
        self._kept: list[Tensor] = []
        self._nbytes = 0
        self._goodbyes: list[Any] = []

    def wire_tag(self, tag: int) -> int:
        """Return the tag that MPI is given: larger ones than it knows are folded.

        Messages tell their own tags, so that two which meet in one are not mixed up.
        """
        return self.tags if tag == EXCHANGE_TAG else tag % self.tags

    def memory(self, x: Tensor, begin: int = 0, nbytes: int | None = None) -> Any:
        """Return bytes of a contiguous tensor as MPI takes them; `x` lives until `finish`."""
        length = x.nbytes - begin if nbytes is None else nbytes
        self._kept.append(x)
        self._nbytes += length
        return self.mpi.buffer.fromaddress(x.data_ptr() + begin, length)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors live until `finish`."""
        for x in tensors:
            self._kept.append(x)
            self._nbytes += x.nbytes

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield begin and length of the stretches in which `nbytes` bytes travel."""
        for begin in range(0, nbytes, self.chunk_bytes):
            yield begin, min(self.chunk_bytes, nbytes - begin)

    def start(self, call: Callable[..., Any], *args: Any) -> None:
        """Start a non-blocking MPI call."""
        with self.threads.lock:
            self._open.append(call(*args))

    def finish(self) -> None:
        """Wait for everything that was started."""
        requests, lock = self._open, self.threads.lock
        spins, wait, began = 0 if self.behind else self._spins, None, 0
        while requests:
            with lock:
                done = requests[-1].Test()
            if done:
                requests.pop()
            elif spins > 0:
                spins -= 1
            elif wait is None:
                began = time.perf_counter_ns()
                wait = Wait(self.watch, self.timeout_s, self._nbytes)
            else:
                self.step(wait)
        if wait is not None:
            self.waited_ns += time.perf_counter_ns() - began
        self._kept.clear()
        self._nbytes = 0

    def step(self, wait: Wait) -> None:
        """Let some time pass in a wait, and look for ranks that have left."""
        if wait.step():
            self.hear_goodbyes()

    def say_goodbye(self) -> None:
        """Tell the other ranks that this one leaves, with its number of collectives."""
        made = str(self.watch.number).encode()
        for peer in range(self.size):
            if peer != self.rank:
                with self.threads.lock, contextlib.suppress(self.mpi.Exception):
                    block = [made, self.mpi.BYTE]
                    self._goodbyes.append(self.comm.Isend(block, peer, self.max_tag))

    def hear_goodbyes(self) -> None:
        """Take down the ranks that have left the group so far."""
        mpi = self.mpi
        while True:
            with self.threads.lock:
                status = mpi.Status()
                message = self.comm.Improbe(mpi.ANY_SOURCE, self.max_tag, status)
                if message is None:
                    return
                room = bytearray(status.Get_count(mpi.BYTE))
                message.Recv([room, mpi.BYTE])
            self.watch.gone[status.Get_source()] = int(room)

    def has_everybody_left(self) -> bool:
        """Whether all other ranks have said that they leave, and know that this one does."""
        self.hear_goodbyes()
        with self.threads.lock:
            delivered = self.mpi.Request.Testall(self._goodbyes)
        return delivered and len(self.watch.gone) == self.size - 1

    def run(self, kernel: Callable[[], object]) -> None:
        """Run one kernel: errors of MPI become ours, and what is left open is kept alive."""
        try:
            kernel()
        except BaseException as error:
            abandon(self._open, self._kept)
            self._open, self._kept, self._nbytes = [], [], 0
            if isinstance(error, self.mpi.Exception):
                raise self.translated(error) from error
            raise

    def barrier(self) -> None:
        """Return when every rank has come."""
        self.start(self.comm.Ibarrier)
        self.finish()

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

"""What a rank looks for during a long wait: failed, dead and departed peers, and its deadline.

Ranks tell each other of failures, and how far they have come, through the group's store. A store
that has gone takes nothing and tells nothing: then the deadline is what ends a wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import PrefixStore, Store, TCPStore

from unisono.comm.health.deadlock import hopeless
from unisono.comm.machine import is_dead
from unisono.errors import RankFailed, RankTimeout, UnisonoError, compress_ranks

PEERS_S = 0.05
"""Seconds between two looks at the peers."""
STORE_S = 0.25
"""Seconds between two looks at the store."""
GONE_S = 1.0
"""What a rank sent before it left arrives within this time."""

_YIELD_S = 2e-3
_YIELD_S_PER_BYTE = 2e-9
"""MPI moves data only inside its calls, so sleep starts when the bytes should have arrived."""
_FIRST_NAP_S = 20e-6
_LAST_NAP_S = 200e-6


@dataclass(frozen=True)
class Member:
    """A rank of a group, as it told about itself when the group was made."""

    position: int
    """Rank in the communicator from which the group was made."""
    job_size: int
    """Size of that communicator."""
    memory: str
    """The same word for processes that can see each other."""
    pid: int
    started: int
    hostname: str


@dataclass(frozen=True)
class Notice:
    """What a rank that fails tells the others of its group.

    Attributes:
        kind: `failed` or `timeout`.
        teller: world rank of the sender.
        culprit: world rank to blame.
        number: number of the collective in which it happened.
        host: host of the sender.
        text: for people.
    """

    kind: str
    teller: int
    culprit: int
    number: int
    host: str
    text: str


class Connection:
    """A connection to a store that no blocking call of others can lock."""

    def __init__(self, store: Store) -> None:
        self.store = store


_connections: weakref.WeakValueDictionary[tuple[str, int], Connection] = (
    weakref.WeakValueDictionary()
)
"""One per store, for as long as a group uses it."""


def connect(store: Store) -> Connection:
    """Return a connection of our own to the store beneath all prefixes of `store`."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return Connection(store)
    address = (store.host, store.port)
    found = _connections.get(address)
    if found is not None:
        with contextlib.suppress(RuntimeError):
            found.store.check(["unisono"])
            return found
    found = _connections[address] = Connection(store.clone())  # type: ignore[attr-defined]
    return found


class NoticeBoard:
    """What the ranks of a group leave in its store: failures, and in which collective they wait.

    The connection is made with the group: one made only when something is wrong could block for
    long, if the rank that keeps the store has gone.

    Args:
        store: a store that all ranks of the group share.
        nonce: a token of this group alone.
        rank: own rank in the group.
        size: ranks of the group.
    """

    def __init__(self, store: Store, nonce: str, rank: int, size: int) -> None:
        self._home = store  # served by this rank perhaps, and wanted until all have left
        self._connection = connect(store)
        self._store = PrefixStore(f"unisono/mpi/{nonce}", self._connection.store)
        self._rank = rank
        self._size = size
        self._failures: list[Notice] = []

    def post(self, notice: Notice) -> None:
        """Tell the other ranks of a failure."""
        with contextlib.suppress(RuntimeError):
            number = self._store.add("failures", 1)
            self._store.set(f"failure/{number}", json.dumps(asdict(notice)))

    def failures(self) -> list[Notice]:
        """Return the failures posted so far; each is fetched once."""
        with contextlib.suppress(RuntimeError):
            while self._store.check([key := f"failure/{len(self._failures) + 1}"]):
                self._failures.append(Notice(**json.loads(self._store.get(key))))
        return self._failures

    def mark(self, number: int) -> None:
        """Tell that this rank waits in collective `number`."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"mark/{self._rank}", str(number))

    def missing(self, number: int) -> list[int]:
        """Return the ranks that are not known to wait in collective `number` or a later one."""
        found: list[int] = []
        with contextlib.suppress(RuntimeError):
            for rank in range(self._size):
                key = f"mark/{rank}"
                mark = int(self._store.get(key)) if self._store.check([key]) else -1
                if rank != self._rank and mark < number:
                    found.append(rank)
            return found
        return []


class Watch:
    """Judges the peers of one rank of a group.

    Args:
        ranks: world ranks of the group.
        rank: own rank in the group.
        members: what the ranks told about themselves.
        board: what they tell each other.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, members: Sequence[Member], board: NoticeBoard
    ) -> None:
        self.ranks = tuple(ranks)
        self.me = self.ranks[rank]
        self.board = board
        self.doing = "set-up"
        """Name of the call under way, for messages."""
        self.number = 0
        """Number of the latest collective."""
        self.cancelled: str | None = None
        """Why waits of this rank shall end, set by another thread of this process."""
        self.gone: dict[int, int] = {}
        """Ranks of the group that have left it, with the collectives they have made."""
        here = members[rank].memory
        self._neighbours = [
            (place, member)
            for place, member in enumerate(members)
            if place != rank and member.memory == here
        ]

    def judge(self, peers: Sequence[int] | None) -> None:
        """Raise if this rank is to stop waiting, or a rank that is waited for has died."""
        if self.cancelled is not None:
            raise UnisonoError.because(f"{self.doing} on rank {self.me}", self.cancelled)
        for place, member in self._neighbours:
            awaited = peers is None or place in peers
            if awaited and is_dead(member.pid, member.started):
                self.judge_failures()  # what it has said last tells more
                raise self._died(self.ranks[place], member)

    def judge_failures(self) -> None:
        """Raise if a rank of the group has posted a failure; asks the store."""
        for notice in self.board.failures():
            # Ranks that wait in one collective have their own deadlines for it.
            if notice.kind != "timeout" or notice.number != self.number:
                raise self._failed(notice)

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

    def timed_out(self, peers: Sequence[int] | None, timeout_s: float) -> RankTimeout:
        """Return the error for a deadline that passed."""
        places = self.board.missing(self.number) if peers is None else peers
        absent = [self.ranks[place] for place in places]
        arrival = f"rank {compress_ranks(absent)}" if absent else "not known"
        return RankTimeout(
            f"{self.doing} on rank {self.me} timed out after {timeout_s:g} s\n"
            f"  not arrived: {arrival}\n"
            "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree; "
            "UNISONO_TIMEOUT_S sets the deadline",
            missing=absent,
            op=self.doing,
        )

    def left(self, gone: Sequence[int]) -> RankFailed:
        """Return the error for peers that have left."""
        return RankFailed(
            f"rank {compress_ranks(gone)} has closed the group, "
            f"but rank {self.me} waits for it in {self.doing}\n"
            "  HINT: let all ranks make the same calls before they close the group",
            rank=gone[0],
        )

    def _failed(self, notice: Notice) -> RankFailed | RankTimeout:
        if notice.kind == "timeout" and notice.culprit == self.me:
            return RankTimeout(
                f"{self.doing} on rank {self.me} cannot end: "
                f"rank {notice.teller} waited for this rank and has given up\n{notice.text}",
                missing=[notice.teller],
                op=self.doing,
            )
        start = (
            f"rank {notice.teller} failed"
            if notice.culprit == notice.teller
            else f"rank {notice.teller} has given up waiting for rank {notice.culprit}"
            if notice.kind == "timeout"
            else f"rank {notice.culprit} failed, as rank {notice.teller} has seen"
        )
        return RankFailed(
            f"{start} while rank {self.me} waited in {self.doing}\n{notice.text}",
            rank=notice.culprit,
            host=notice.host,
            traceback=notice.text,
        )

    def _died(self, rank: int, member: Member) -> RankFailed:
        return RankFailed(
            f"rank {rank} (process {member.pid} on {member.hostname}) died "
            f"while rank {self.me} waited for it in {self.doing}\n"
            f"  HINT: look at the last output of rank {rank}",
            rank=rank,
            host=member.hostname,
        )


class Wait:
    """One wait, step by step: give the core away, later sleep; look at the peers and the clock.

    Args:
        watch: judges the peers.
        timeout_s: deadline of the wait.
        nbytes: bytes under way.
        peers: the ranks that are waited for; None is the whole group.
    """

    def __init__(
        self, watch: Watch, timeout_s: float, nbytes: int = 0, peers: Sequence[int] | None = None
    ) -> None:
        now = time.monotonic()
        self._watch = watch
        self._peers = peers
        self._timeout_s = timeout_s
        self._deadline = now + timeout_s
        self._sleep_from = now + _YIELD_S + nbytes * _YIELD_S_PER_BYTE
        self._nap_s = _FIRST_NAP_S
        self._look = now + min(PEERS_S, timeout_s / 2)
        self._mark = now + min(2 * STORE_S, timeout_s / 2)
        self._store = now + STORE_S
        self._gone_since: float | None = None

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
        self._look = min(now + PEERS_S, self._deadline)
        self._judge(now)
        return True

    def _judge(self, now: float) -> None:
        watch, peers = self._watch, self._peers
        watch.judge(peers)
        if now >= self._mark and peers is None:
            self._mark = float("inf")
            watch.board.mark(watch.number)
        if now >= self._deadline:
            watch.judge_failures()
            raise watch.timed_out(peers, self._timeout_s)
        gone = watch.departed(peers)
        if gone and self._gone_since is None:
            self._gone_since = now
        elif gone and self._gone_since is not None and now > self._gone_since + GONE_S:
            watch.judge_failures()
            raise watch.left(gone)
        if now >= self._store:
            self._store = now + STORE_S
            reason = hopeless()
            if reason is not None:
                raise reason  # first: a rank that fails of a mismatch posts that as its failure
            watch.judge_failures()

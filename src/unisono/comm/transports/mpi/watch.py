"""What a rank looks for during a long wait: failed, dead and departed peers, and its deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.comm import watchdog
from unisono.comm.outlook import hopeless
from unisono.comm.processes import is_dead
from unisono.comm.transports.mpi.news import News, Notice
from unisono.errors import RankFailed, RankTimeout, UnisonoError, compress_ranks

PEERS_S = 0.05
"""Seconds between two looks at the peers."""
STORE_S = 0.5
"""Seconds between two looks at the store."""
GONE_S = 1.0
"""What a rank sent before it left arrives within this time."""


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


class Marks:
    """How far each rank of a group has come, kept in the store by ranks that wait for long.

    They go through the connection of the watchdog: one made only now could block for long, if the
    rank that keeps the store has gone.

    Args:
        nonce: a word of this group alone.
        rank: own rank in the group.
        size: ranks of the group.
    """

    def __init__(self, nonce: str, rank: int, size: int) -> None:
        self._nonce = nonce
        self._rank = rank
        self._size = size

    def leave(self, number: int) -> None:
        """Tell that this rank waits in collective `number`."""
        dog = watchdog.current()
        if dog is not None:
            dog.put(self._key(self._rank), str(number))

    def missing(self, number: int) -> list[int]:
        """Return the ranks that are not known to wait in collective `number` or a later one."""
        dog = watchdog.current()
        if dog is None:
            return []
        others = [rank for rank in range(self._size) if rank != self._rank]
        return [rank for rank in others if int(dog.find(self._key(rank)) or -1) < number]

    def _key(self, rank: int) -> str:
        return f"mark/{self._nonce}/{rank}"


class Watch:
    """Judges the peers of one rank of a group.

    Args:
        ranks: world ranks of the group.
        rank: own rank in the group.
        members: what the ranks told about themselves.
        news: what they tell each other.
        marks: how far they have come.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        members: Sequence[Member],
        news: News,
        marks: Marks,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.news = news
        self.marks = marks
        self.doing = "set-up"
        """Name of the call under way, for messages."""
        self.number = 0
        """Number of the latest collective."""
        self.cancelled: str | None = None
        """Why waits of this rank shall end, set by another thread of this process."""
        here = members[rank].memory
        self._neighbours = [
            (place, member)
            for place, member in enumerate(members)
            if place != rank and member.memory == here
        ]

    def begin(self, timeout_s: float, peers: Sequence[int] | None = None) -> Vigil:
        """Start to watch over one wait, for `peers` or for the whole group."""
        return Vigil(self, timeout_s, peers)

    @property
    def me(self) -> int:
        """Own world rank."""
        return self.ranks[self.rank]

    def judge(self, peers: Sequence[int] | None) -> None:
        """Raise if a rank that is waited for has failed or died."""
        if self.cancelled is not None:
            raise UnisonoError.because(f"{self.doing} on rank {self.me}", self.cancelled)
        self.news.listen()
        for notice in self.news.failures:
            # Ranks that wait in one collective have their own deadlines for it.
            if notice.kind != "timeout" or notice.number != self.number:
                raise self._failed(notice)
        for place, member in self._neighbours:
            awaited = peers is None or place in peers
            if awaited and is_dead(member.pid, member.started):
                raise self._died(self.ranks[place], member)

    def departed(self, peers: Sequence[int] | None) -> list[int]:
        """Return the world ranks among `peers` that have left the group."""
        awaited = self.ranks if peers is None else [self.ranks[place] for place in peers]
        return sorted(self.news.gone.intersection(awaited))

    def timed_out(self, peers: Sequence[int] | None, timeout_s: float) -> RankTimeout:
        """Return the error for a deadline that passed."""
        places = self.marks.missing(self.number) if peers is None else peers
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
            "  HINT: let all ranks make the same calls before destroy_process_group()",
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


class Vigil:
    """One wait: when to look at the peers, and when to give up."""

    __slots__ = (
        "_deadline",
        "_gone_since",
        "_look",
        "_mark",
        "_peers",
        "_store",
        "_timeout_s",
        "_watch",
    )

    def __init__(self, watch: Watch, timeout_s: float, peers: Sequence[int] | None) -> None:
        now = time.monotonic()
        self._watch = watch
        self._peers = peers
        self._timeout_s = timeout_s
        self._deadline = now + timeout_s
        self._look = now + min(PEERS_S, timeout_s / 2)
        self._mark = now + min(STORE_S, timeout_s / 2)
        self._store = now + STORE_S
        self._gone_since: float | None = None

    def look(self) -> None:
        """Look at the peers if it is time to."""
        now = time.monotonic()
        if now < self._look:
            return
        watch = self._watch
        watch.judge(self._peers)
        if now >= self._mark and self._peers is None:
            self._mark = float("inf")
            watch.marks.leave(watch.number)
        if now >= self._deadline:
            raise watch.timed_out(self._peers, self._timeout_s)
        gone = watch.departed(self._peers)
        if gone and self._gone_since is None:
            self._gone_since = now
        elif self._gone_since is not None and now > self._gone_since + GONE_S:
            raise watch.left(gone)
        if now >= self._store:
            self._store = now + STORE_S
            reason = hopeless()
            if reason is not None:
                raise reason
        self._look = min(now + PEERS_S, self._deadline)

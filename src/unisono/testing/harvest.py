"""Collect the replies of ranks to one command, within a deadline, whatever they do.

After a first failure the others get a short grace; who has not answered then is still waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pickle import loads

from unisono.errors import compress_ranks
from unisono.testing.messages import Raised, Reply


@dataclass(frozen=True)
class Rank:
    """A rank process, seen from the pool."""

    number: int
    """Its rank in every world."""
    pid: int
    """Its process id."""
    conn: Connection
    """The connection to it."""


@dataclass
class Harvest:
    """The replies to one command, as far as they came; failures in the order of arrival."""

    world: int
    replies: dict[int, Reply] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    waited: str = ""

    @property
    def raised(self) -> dict[int, Raised]:
        """Ranks that raised, first one first."""
        return {rank: r for rank, r in self.replies.items() if isinstance(r, Raised)}

    @property
    def failed(self) -> bool:
        """Whether any rank did not simply do it."""
        return bool(self.died or self.waiting or self.raised)

    @property
    def stalled(self) -> bool:
        """Whether ranks did not come back although none had failed."""
        return bool(self.waiting) and not self.died and not self.raised

    def unanimous(self) -> Raised | None:
        """The wish to skip, to xfail or to drop an example, when every rank has the same one."""
        raised = list(self.raised.values())
        wishes = {r.outcome for r in raised}
        alike = len(raised) == self.world and len(wishes) == 1 and "error" not in wishes
        return raised[0] if alike else None


def gather_replies(
    ranks: Sequence[Rank], *, timeout_s: float, grace_s: float, bury: Callable[[Rank], int]
) -> Harvest:
    """Wait for one reply of each rank.

    Args:
        ranks: whom to listen to.
        timeout_s: time for all of them.
        grace_s: time for the others after a first failure, if that is less.
        bury: called for a rank whose connection closed; returns its exit code.
    """
    start = time.monotonic()
    deadline = start + timeout_s
    first: list[int] = []
    pending = {rank.conn: rank for rank in ranks}
    harvest = Harvest(len(ranks))
    while pending and (left := deadline - time.monotonic()) > 0:
        failures: list[int] = []
        for conn in wait(list(pending), left):
            assert isinstance(conn, Connection)
            rank = pending.pop(conn)
            try:
                reply = loads(conn.recv_bytes())
            except (EOFError, OSError):
                harvest.died[rank.number] = bury(rank)
                failures.insert(0, rank.number)
                continue
            harvest.replies[rank.number] = reply
            if isinstance(reply, Raised):
                failures.append(rank.number)
        if failures and not first:
            first = failures
            deadline = min(deadline, time.monotonic() + grace_s)
    harvest.waiting = sorted(rank.number for rank in pending.values())
    seconds = time.monotonic() - start
    harvest.waited = f"after {seconds:.1f} s"
    if first:
        harvest.waited += f", {grace_s:g} s after rank {compress_ranks(first[:1])} had failed"
    return harvest

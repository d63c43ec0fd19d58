"""torch's barrier that names who is missing; the ranks meet at the group's store.

So it needs nothing of a transport that may be stuck, and breaks nothing when ranks do not come.
The first line of an error is worded as gloo words it: callers look for these words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from unisono.errors import RankTimeout

_NAP_S, _LONGEST_NAP_S = 0.001, 0.05


class MonitoredBarrier:
    """The monitored barriers of a group, one after the other.

    Args:
        store: a store of the group alone.
        rank: own place in the group.
        ranks: world rank of each place.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int]) -> None:
        self._store = dist.PrefixStore("monitored", store)
        self._rank, self._ranks = rank, ranks
        self._number = 0

    def __call__(self, timeout_s: float, *, wait_all_ranks: bool) -> None:
        """Return when all ranks have come; else rank 0 names the first that has not, or all."""
        self._number += 1
        deadline, me = time.monotonic() + timeout_s, self._ranks[self._rank]
        verdict = f"{self._number}/verdict"
        if self._rank:
            self._store.set(f"{self._number}/{self._rank}", "")
            if _wait(lambda: self._store.check([verdict]), deadline):
                verdict_text = self._store.get(verdict).decode()
                if not verdict_text:
                    return
            else:
                verdict_text = f"no answer within {timeout_s:g} s"
            raise RankTimeout(
                f"Rank {me} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank {self._ranks[0]}\n  found: {verdict_text}",
                op="monitored_barrier",
            )
        late = [] if timeout_s > 0 else [0]
        for rank in range(1, len(self._ranks)):
            if late and not wait_all_ranks:
                break
            arrived = [f"{self._number}/{rank}"]
            if not _wait(lambda arrived=arrived: self._store.check(arrived), deadline):
                late.append(rank)
        missing = [self._ranks[rank] for rank in late]
        name = f"Rank{'s' if len(late) > 1 else ''} {', '.join(map(str, missing))}"
        what = "timed out in" if late == [0] else "failed to pass"
        verdict_text = f"{name} {what} monitoredBarrier in {timeout_s * 1000:g} ms" if late else ""
        self._store.set(verdict, verdict_text)
        if late:
            raise RankTimeout(verdict_text, missing=missing, op="monitored_barrier")
        for rank in range(1, len(self._ranks)):
            self._store.delete_key(f"{self._number}/{rank}")
        self._store.delete_key(f"{self._number - 1}/verdict")  # read by all, who are here


def _wait(is_there: Callable[[], bool], deadline: float) -> bool:
    nap_s = _NAP_S
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    return True

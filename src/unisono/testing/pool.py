"""A pool of ranks that outlive tests: real processes, a fresh process group for each world.

This is the side of the test process: it starts ranks when they are first needed and ends them.
What is done with them is in `rank_world.py`; what they do themselves in `rank_main.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from unisono.errors import PlatformError, RankFailed
from unisono.testing.harvest import Rank
from unisono.testing.nursery import Nursery
from unisono.testing.rank_world import RankWorld

T = TypeVar("T")


class RankPool:
    """Ranks that are started once and run function after function.

    Use one pool for a whole session; `with RankPool() as pool:` ends it. Not for several threads.

    Attributes:
        starts: how many rank processes were started so far (a failure makes new ones necessary).
        by_value: returns the modules that travel by value; set by the pytest plugin.

    Example:
        >>> def total():
        ...     import torch, torch.distributed as dist
        ...
        ...     x = torch.tensor([float(dist.get_rank())])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> with RankPool() as pool:
        ...     pool.run(total, world=2)
        [1.0, 1.0]
    """

    def __init__(self, *, max_ranks: int = 16, grace_s: float = 1.0) -> None:
        """Make a pool; nothing is started yet.

        Args:
            max_ranks: largest world.
            grace_s: after a first failure, how long the other ranks may take to come back.
        """
        self.max_ranks = max_ranks
        self.grace_s = grace_s
        self.starts = 0
        self.by_value: Callable[[], Iterable[types.ModuleType]] = tuple
        self._nursery: Nursery | None = None
        self._ranks: dict[int, Rank] = {}
        self._stores = 0
        self._owner = os.getpid()
        self._end_nursery: Callable[[], object] = lambda: None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        world: int = 2,
        timeout: float = 20.0,
        backend: str = "gloo",
        **kwargs: Any,
    ) -> list[T]:
        """Run `function` on `world` ranks with a fresh default process group.

        Args:
            function: called on every rank with the same arguments.
            *args: positional arguments for it.
            world: number of ranks.
            timeout: seconds after which ranks that have not returned are stopped.
            backend: backend of the process group.
            **kwargs: keyword arguments for it.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankFailure: ranks raised, died or did not come back.
        """
        __tracebackhide__ = True
        with self.open(world, timeout=timeout, backend=backend) as ranks:
            values = ranks.call(function, args, kwargs)
            ranks.echo()
        return values

    @contextlib.contextmanager
    def open(
        self, world: int, *, timeout: float = 20.0, backend: str = "gloo"
    ) -> Iterator[RankWorld]:
        """Give a world of ranks that share one process group for several calls."""
        __tracebackhide__ = True
        ranks = RankWorld(self, world, timeout_s=timeout, backend=backend)
        try:
            ranks.open()
            yield ranks
            ranks.close()
        finally:
            ranks.abandon()

    def close(self) -> None:
        """End all ranks and remove every trace of them; the pool can be used again."""
        for rank in self._ranks.values():
            rank.conn.close()
        self._ranks.clear()
        self._end_nursery()
        self._nursery = None

    def warm_up(self) -> None:
        """Start importing torch in the background, for the ranks to come."""
        self._warm_nursery()

    @property
    def directory(self) -> Path:
        """Private directory of the pool, removed when it closes."""
        return self._warm_nursery().directory

    def new_store(self) -> Path:
        """Return a file name for the rendezvous of a new group."""
        self._stores += 1
        return self.directory / f"store{self._stores}"

    def owned(self) -> set[str]:
        """Name what the pool itself holds in this process, for `Holdings.new(ignore=...)`."""
        if self._nursery is None:
            return set()
        fds = [self._nursery.fileno(), *(rank.conn.fileno() for rank in self._ranks.values())]
        names = {f"pid:{self._nursery.pid}", self._nursery.directory.name}
        return names | {f"fd:{fd}" for fd in fds}

    def take(self, world: int) -> list[Rank]:
        """Return ranks 0 to world-1, starting those that are missing."""
        self._check(world)
        if self._nursery is not None and not self._nursery.is_alive():
            self.close()
        nursery = self._warm_nursery()
        for number in range(world):
            rank = self._ranks.get(number)
            if rank is not None and rank.conn.poll(0):  # an idle rank says nothing but goodbye
                self.discard([number])
            if number not in self._ranks:
                pid, conn = nursery.fork(number)
                self._ranks[number] = Rank(number, pid, conn)
                self.starts += 1
        return [self._ranks[number] for number in range(world)]

    def discard(self, numbers: Iterable[int]) -> None:
        """Kill ranks; the next world starts new ones."""
        for number in list(numbers):
            rank = self._ranks.get(number)
            if rank is not None:
                self._end(rank, kill=True)

    def bury(self, rank: Rank) -> int:
        """Return how a rank ended whose connection closed: exit code, or minus the signal."""
        return self._end(rank, kill=False)

    def _end(self, rank: Rank, *, kill: bool) -> int:
        self._ranks.pop(rank.number, None)
        rank.conn.close()
        try:
            return self._warm_nursery().reap(rank.pid, kill=kill)
        except (RankFailed, OSError):  # the warm process is gone, and its ranks with it
            return -signal.SIGKILL

    def _warm_nursery(self) -> Nursery:
        if self._nursery is None:
            self._nursery = Nursery()
            self._end_nursery = weakref.finalize(self, _close_in_owner, self._nursery, os.getpid())
        return self._nursery

    def _check(self, world: int) -> None:
        if os.getpid() != self._owner:
            raise PlatformError.because(
                "RankPool used in another process than the one that made it",
                f"made in process {self._owner}, used in {os.getpid()}",
                hint="make a RankPool() in this process",
            )
        if not 1 <= world <= self.max_ranks:
            raise PlatformError.because(
                f"a world of {world} ranks",
                f"this pool has 1 to {self.max_ranks}",
                hint=f"RankPool(max_ranks={max(world, 1)})",
            )


def _close_in_owner(nursery: Nursery, owner: int) -> None:
    """End a nursery, but not from a forked copy of the process that made it."""
    if os.getpid() == owner:
        nursery.close()

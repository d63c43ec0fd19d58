"""A pool of ranks that outlive tests: real processes, a fresh process group for each world.

This is the side of the test process: it forks ranks from a warm server when they are first needed,
has them run functions in worlds, and ends them. What they do themselves is in `rank.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle

from unisono.errors import PlatformError, RankFailed
from unisono.expect import expect_int
from unisono.launch.logs import text_from
from unisono.launch.pool.cleanup import make_temporary_directory
from unisono.launch.pool.client import ANSWER_S, RankProcess, ServerGone, WarmServer
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import send_message
from unisono.launch.pool.stacks import folded_threads
from unisono.testing.report import STACK_SIGNAL, Findings, Raised, RankFailure
from unisono.testing.shipping import pack

T = TypeVar("T")

PRELOAD = ("torch.distributed.device_mesh", "torch._dynamo", "pytest", "unisono.testing.rank")
"""Loaded before ranks are forked; `_dynamo` is what the first optimizer of a process imports."""
_JOIN_S = 60.0
_LEAVE_S = 20.0
_STACKS_S = 0.5
_LINGER_S = 0.5
"""How long helpers of a rank that was killed may take to clear up, as resource trackers do."""
_SILENT = "(the process did not answer: it is stopped or in an uninterruptible call)"


class UnanimousOutcome(Exception):
    """All ranks asked for the same outcome: to skip, to xfail, or to drop a drawn example.

    Attributes:
        outcome: `"skip"`, `"xfail"` or `"assume"`.
        reason: the text given.
    """

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(f"all ranks: {outcome} {reason}".rstrip())
        self.outcome = outcome
        self.reason = reason


class RankStall(RankFailure):
    """Ranks did not come back within the deadline, and none of them had failed before."""


class _Monitor(RankMonitor):
    """Listens to the ranks of a pool, and keeps the latest reply of each."""

    def __init__(self) -> None:
        super().__init__(STACK_SIGNAL)
        self.replies: dict[int, Any] = {}

    def take_news(self, rank: RankProcess, news: Any) -> None:
        if news != {"state": "running"}:
            self.replies[rank.rank] = news


class _Warm(NamedTuple):
    """What a pool has once it was used."""

    server: WarmServer
    """The process that starts the ranks."""
    monitor: _Monitor
    """Listens to them."""
    directory: Path
    """Private directory, removed when the pool closes."""

    def close(self) -> None:
        """End the ranks, but not from a forked copy of the process that made them."""
        if os.getpid() == self.server.owner_pid:
            self.server.close()
            self.monitor.close()
            shutil.rmtree(self.directory, ignore_errors=True)


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

    def __init__(
        self, *, max_ranks: int = 16, grace_s: float = 1.0, preload: Sequence[str] = ()
    ) -> None:
        """Make a pool; nothing is started yet.

        Args:
            max_ranks: largest world.
            grace_s: after a first failure, how long the other ranks may take to come back.
            preload: modules that take long to import, loaded once for all ranks.
        """
        self.max_ranks = max_ranks
        self.grace_s = grace_s
        self.preload = tuple(preload)
        self.starts = 0
        self.by_value: Callable[[], Iterable[types.ModuleType]] = tuple
        self._ranks: dict[int, RankProcess] = {}
        self._owner = os.getpid()
        self._warm: _Warm | None = None
        self._end: Callable[[], object] = lambda: None

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
        """Give a world of ranks that share one process group for several calls.

        The first call makes the group.
        """
        __tracebackhide__ = True
        ranks = RankWorld(self, world, timeout_s=timeout, backend=backend)
        try:
            yield ranks
            ranks.close()
        finally:
            ranks.abandon()

    def close(self) -> None:
        """End all ranks and remove every trace of them; the pool can be used again."""
        self._ranks.clear()
        self._end()
        self._warm = None

    def warm_up(self) -> _Warm:
        """Start importing torch in the background, for the ranks to come."""
        if self._warm is None:
            server = WarmServer((*PRELOAD, *self.preload))
            self._warm = _Warm(server, _Monitor(), make_temporary_directory(None))
            self._end = weakref.finalize(self, self._warm.close)
        return self._warm

    def owned(self) -> set[str]:
        """Name what the pool itself holds in this process, for `Holdings.new(ignore=...)`."""
        if self._warm is None:
            return set()
        server, monitor, directory = self._warm
        fds = [*server.fds, monitor.fileno(), *(fd for r in self._ranks.values() for fd in r.fds)]
        return {f"pid:{server.pid}", directory.name, *(f"fd:{fd}" for fd in fds)}

    def take(self, world: int) -> list[RankProcess]:
        """Return ranks 0 to world-1, starting those that are missing."""
        if os.getpid() != self._owner:
            raise PlatformError.because(
                "RankPool used in another process than the one that made it",
                f"made in process {self._owner}, used in {os.getpid()}",
                hint="make a RankPool() in this process",
            )
        expect_int("ranks of a world", world, 1, self.max_ranks + 1, error=PlatformError)
        if self._warm is not None and not self._warm.server.is_alive:
            self.close()
        warm = self.warm_up()
        while warm.monitor.wait(0):  # an idle rank may have ended
            pass
        self.discard([n for n, rank in self._ranks.items() if not rank.is_running])
        for number in range(world):
            if number not in self._ranks:
                self._ranks[number] = self._start(number, warm)
                self.starts += 1
        return [self._ranks[number] for number in range(world)]

    def discard(self, numbers: Iterable[int]) -> None:
        """Kill ranks; the next world starts new ones."""
        for number in numbers:
            rank = self._ranks.pop(number, None)
            if rank is not None and self._warm is not None:
                rank.signal(signal.SIGKILL)  # the server ends what it has started
                if rank.is_running:
                    rank.collect()
                self._warm.monitor.drop(rank)

    def _start(self, number: int, warm: _Warm) -> RankProcess:
        main = "unisono.testing.rank:answer_pool"
        try:
            with RankProcess(number, warm.directory) as rank:
                context = {"rank": number, "stacks": str(rank.stack_path)}
                rank.process = process = warm.server.fork(
                    main, context, rank.theirs, streams=rank.streams, linger_s=_LINGER_S
                )
            why = process.confirm(ANSWER_S)
        except ServerGone as error:
            last_words = warm.server.last_words()
            raise RankFailed(
                f"the process that starts the ranks ended, or does not answer\n{last_words}",
                rank=number,
                log_tail=last_words,
            ) from error
        if why is not None:
            rank.close()
            raise RankFailed(f"the process that starts the ranks refuses: {why}", rank=number)
        warm.monitor.watch(rank)
        return rank


class RankWorld:
    """A world of ranks of a pool; get one from `RankPool.open`.

    Many calls in one group are what drawn examples need: making a group costs far more than a call.
    After a failure the ranks are gone; the next call starts new ones and a new group.

    Attributes:
        size: number of ranks.
        is_open: whether there is a process group now.
    """

    def __init__(self, pool: RankPool, size: int, *, timeout_s: float, backend: str) -> None:
        self.size = size
        self.is_open = False
        self._pool = pool
        self._timeout_s = timeout_s
        self._backend = backend
        self._ranks: list[RankProcess] = []
        self._store = Path()
        self._packed: tuple[Callable[..., Any], bytes] | None = None

    def open(self) -> None:
        """Join a fresh process group on all ranks; `call` does it when needed."""
        __tracebackhide__ = True
        self._ranks = self._pool.take(self.size)
        for rank in self._ranks:
            for file in (rank.log_path, rank.stack_path):
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(file, 0)
        self._store = self._pool.warm_up().directory / f"store-{secrets.token_hex(8)}"
        self.is_open = True
        self._ask(
            "open",
            _JOIN_S,
            doing="joining the process group",
            world=self.size,
            store=str(self._store),
            secret=secrets.token_bytes(32),
            backend=self._backend,
            # A bit before that of the test, so that a collective can tell its own story. Joining
            # has this much time, too, so a short test leaves the word to the pool.
            group_timeout_s=self._timeout_s - 2.0 if self._timeout_s >= 6.0 else 30.0,
            environ=dict(os.environ),
            cwd=str(Path.cwd()),
            path=[str(Path(entry).absolute()) for entry in sys.path],
            filters=_warning_filters(),
        )

    def call(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        drawn: Mapping[str, Any] | None = None,
        remake: tuple[str, ...] = (),
        verbosity: int = 0,
    ) -> list[T]:
        """Run a function on every rank and return what each returned, by rank.

        Args:
            function: what to run.
            args: positional arguments, the same for all.
            kwargs: keyword arguments, the same for all.
            drawn: keyword arguments that change from call to call. With them, the function and its
                other arguments are pickled and unpickled once, which takes far longer.
            remake: pytest fixtures that each rank makes itself.
            verbosity: verbosity of pytest's comparisons.

        Raises:
            RankFailure: ranks raised, died or did not come back.
            UnanimousOutcome: all ranks asked to skip, to xfail or to drop the example.
            CannotTravel: the function or an argument cannot be sent.
        """
        __tracebackhide__ = True
        by_value = list(self._pool.by_value())
        changing = b""
        if drawn is not None:
            changing = pack(function, (), drawn, by_value, alone=True)
        if drawn is None or self._packed is None or self._packed[0] is not function:
            self._packed = function, pack(function, args, kwargs or {}, by_value)
        if not self.is_open:
            self.open()
        self._ask(
            "call",
            self._timeout_s,
            call=self._packed[1],
            drawn=changing,
            remake=remake,
            verbosity=verbosity,
        )
        values = [rank.value() for rank in self._ranks]
        return [value.load() for value in values if value is not None]

    def close(self) -> dict[int, dict[str, list[str]]]:
        """Leave the group on all ranks; return what each left behind, by rank and kind."""
        __tracebackhide__ = True
        if not self.is_open:
            return {}
        replies = self._ask("close", _LEAVE_S, doing="leaving the process group")
        self._forget()
        self._pool.discard([rank for rank, (_, reusable) in replies.items() if not reusable])
        return {rank: leaks for rank, (leaks, _) in sorted(replies.items()) if leaks}

    def abandon(self) -> None:
        """Kill the ranks of an open world, whatever they are doing."""
        if self.is_open:
            self._forget()
            self._pool.discard(range(self.size))

    def echo(self) -> None:
        """Print here what the ranks printed, each line with its rank."""
        for number, text in self.output().items():
            for line in text.splitlines():
                print(f"[rank {number}] {line}")

    def output(self) -> dict[int, str]:
        """Return what each rank printed since the group was opened."""
        return {rank.rank: text_from(rank.log_path) for rank in self._ranks}

    def _forget(self) -> None:
        self.is_open = False
        self._store.unlink(missing_ok=True)

    def _ask(
        self, method: str, timeout_s: float, *, doing: str = "", **arguments: Any
    ) -> dict[int, Any]:
        """Have every rank call a method of its `Rank`; return the replies, or raise the report."""
        __tracebackhide__ = True
        monitor, grace_s = self._pool.warm_up().monitor, self._pool.grace_s
        replies = monitor.replies = {}
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # a dead rank is found below
                send_message(rank.control, (method, arguments))
        begin = time.monotonic()
        deadline = begin + timeout_s
        died: dict[int, int] = {}
        raised: dict[int, Raised] = {}
        pending = list(self._ranks)
        waited = ""
        while pending and (remaining_s := deadline - time.monotonic()) > 0:
            monitor.wait(remaining_s)
            pending = [rank for rank in pending if rank.rank not in replies]
            ended = {rank.rank: rank.state.exit_code for rank in pending}
            died |= {number: code for number, code in ended.items() if code is not None}
            pending = [rank for rank in pending if rank.rank not in died]
            raised = {n: reply for n, reply in replies.items() if isinstance(reply, Raised)}
            if not waited and (died or raised):  # the others have so much longer
                waited = f", {grace_s:g} s after rank {next(iter((*died, *raised)))} had failed"
                deadline = min(deadline, time.monotonic() + grace_s)
        while monitor.wait(0):  # what they have printed
            pass
        if not (died or raised or pending):
            return replies
        wishes = {reply.outcome for reply in raised.values()}
        if len(raised) == self.size and len(wishes) == 1 and "error" not in wishes:
            raise UnanimousOutcome(wishes.pop(), raised[0].reason)
        waited = f"after {time.monotonic() - begin:.1f} s{waited}"
        stacks = monitor.raw_stacks(pending, _STACKS_S)
        findings = Findings(
            world=self.size,
            doing=doing,
            raised=raised,
            died=died,
            crashes={n: folded_threads(text_from(self._ranks[n].stack_path)) for n in died},
            waiting={
                rank.rank: folded_threads(stacks.get(rank.rank, "")) or _SILENT for rank in pending
            },
            waited=waited,
            output=self.output(),
        )
        self.abandon()
        raise (RankFailure if died or raised else RankStall)(findings)


def _warning_filters() -> bytes:
    """Pickle the warning filters in force here, leaving out those that cannot travel."""
    kept: list[Any] = []
    for entry in warnings.filters:
        with contextlib.suppress(Exception):
            cloudpickle.dumps(entry)
            kept.append(entry)
    return cloudpickle.dumps(kept)

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from unisono.errors import PlatformError, RankFailed
from unisono.expect import expect_int
from unisono.launch.logs import text_from
from unisono.launch.pool.cleanup import make_temporary_directory
from unisono.launch.pool.client import ANSWER_S, Pipes, RankProcess, ServerGone, WarmServer
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import send_message
from unisono.launch.pool.stacks import readable_threads
from unisono.testing.calls import STACK_SIGNAL, Call, Close, Closed, Command, Open, Raised, Reply
from unisono.testing.report import Findings, RankFailure
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


@dataclass
class _Replies:
    """The replies to one command, as far as they came; failures in the order of arrival."""

    replies: dict[int, Reply] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)
    waiting: list[RankProcess] = field(default_factory=list)
    waited: str = ""

    @property
    def raised(self) -> dict[int, Raised]:
        """Ranks that raised, first one first."""
        return {rank: r for rank, r in self.replies.items() if isinstance(r, Raised)}

    @property
    def failed(self) -> bool:
        """Whether any rank did not simply do it."""
        return bool(self.died or self.waiting or self.raised)

    def unanimous(self, world: int) -> Raised | None:
        """The wish to skip, to xfail or to drop an example, when every rank has the same one."""
        raised = list(self.raised.values())
        wishes = {reply.outcome for reply in raised}
        is_alike = len(raised) == world and len(wishes) == 1 and "error" not in wishes
        return raised[0] if is_alike else None


class _Monitor(RankMonitor):
    """Listens to the ranks of a pool."""

    def __init__(self) -> None:
        super().__init__(STACK_SIGNAL)
        self.replies: dict[int, Reply] = {}

    def heard(self, rank: RankProcess, message: Any) -> None:
        """Keep the answer of a rank."""
        if isinstance(message, Reply):
            self.replies[rank.rank] = message

    def ask(
        self, ranks: list[RankProcess], command: Command, *, timeout_s: float, grace_s: float
    ) -> _Replies:
        """Have ranks do something; `grace_s` is for the others after a first failure."""
        self.replies = {}
        for rank in ranks:
            with contextlib.suppress(OSError):  # a dead rank is found below
                send_message(rank.pipes.control, command)
        begin = time.monotonic()
        deadline = begin + timeout_s
        died: dict[int, int] = {}
        first: int | None = None
        pending = list(ranks)
        while pending and (left := deadline - time.monotonic()) > 0:
            self.step(left)
            for rank in pending:
                if rank.rank not in self.replies and rank.exit_code is not None:
                    died[rank.rank] = rank.exit_code
            pending = [r for r in pending if r.rank not in self.replies and r.rank not in died]
            raised = [n for n, reply in self.replies.items() if isinstance(reply, Raised)]
            if first is None and (died or raised):
                first = next(iter((*died, *raised)))
                deadline = min(deadline, time.monotonic() + grace_s)
        while self.step(0):  # what they have printed
            pass
        waited = f"after {time.monotonic() - begin:.1f} s"
        if first is not None:
            waited += f", {grace_s:g} s after rank {first} had failed"
        return _Replies(self.replies, died, pending, waited)


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
        self._stores = 0
        self._owner = os.getpid()
        self._warm: tuple[WarmServer, _Monitor, Path] | None = None
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
        self._ranks.clear()
        self._end()
        self._warm = None

    def warm_up(self) -> None:
        """Start importing torch in the background, for the ranks to come."""
        self._parts()

    @property
    def server(self) -> WarmServer:
        """The process that starts the ranks."""
        return self._parts()[0]

    @property
    def monitor(self) -> _Monitor:
        """Listens to the ranks."""
        return self._parts()[1]

    @property
    def directory(self) -> Path:
        """Private directory of the pool, removed when it closes."""
        return self._parts()[2]

    def new_store(self) -> Path:
        """Return a file name for the rendezvous of a new group."""
        self._stores += 1
        return self.directory / f"store{self._stores}"

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
        if self._warm is not None and not self.server.is_alive:
            self.close()
        while self.monitor.step(0):  # an idle rank may have ended
            pass
        self.discard([n for n, rank in self._ranks.items() if not rank.is_running])
        for number in range(world):
            if number not in self._ranks:
                self._ranks[number] = self._start(number)
                self.starts += 1
        return [self._ranks[number] for number in range(world)]

    def discard(self, numbers: Iterable[int]) -> None:
        """Kill ranks; the next world starts new ones."""
        for number in numbers:
            rank = self._ranks.pop(number, None)
            if rank is not None:
                rank.signal(signal.SIGKILL)  # the server ends what it has started
                if rank.is_running:
                    rank.collect()
                self.monitor.drop(rank)

    def _start(self, number: int) -> RankProcess:
        pipes = Pipes(number, self.directory)
        own = {"rank": number, "stacks": str(pipes.stack_path)}
        main = "unisono.testing.rank:answer_pool"
        try:
            process = self.server.fork_rank(main, own, pipes, linger_s=_LINGER_S)
            rank = RankProcess(number, process, pipes)
            why = process.confirm(ANSWER_S)
        except ServerGone as error:
            told = self.server.last_words()
            raise RankFailed(
                f"the process that starts the ranks ended, or does not answer\n{told}",
                rank=number,
                log_tail=told,
            ) from error
        if why is not None:
            rank.close()
            raise RankFailed(f"the process that starts the ranks refuses: {why}", rank=number)
        self.monitor.watch(rank)
        return rank

    def _parts(self) -> tuple[WarmServer, _Monitor, Path]:
        if self._warm is None:
            self._warm = (
                WarmServer((*PRELOAD, *self.preload)),
                _Monitor(),
                make_temporary_directory(None),
            )
            self._end = weakref.finalize(self, _close, *self._warm)
        return self._warm


def _close(server: WarmServer, monitor: _Monitor, directory: Path) -> None:
    """End the ranks, but not from a forked copy of the process that made them."""
    if os.getpid() == server.owner_pid:
        server.close()
        monitor.close()
        shutil.rmtree(directory, ignore_errors=True)


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
        self._store: Path | None = None
        self._packed: tuple[Callable[..., Any], bytes] | None = None

    def open(self) -> None:
        """Join a fresh process group on all ranks; `call` does it when needed."""
        __tracebackhide__ = True
        self._ranks = self._pool.take(self.size)
        for rank in self._ranks:
            for file in (rank.log.path, rank.stack_path):
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(file, 0)
        self._store = self._pool.new_store()
        command = Open(
            world=self.size,
            store=str(self._store),
            secret=secrets.token_bytes(32),
            backend=self._backend,
            group_timeout_s=_group_timeout_s(self._timeout_s),
            environ=dict(os.environ),
            cwd=str(Path.cwd()),
            path=[str(Path(entry).absolute()) for entry in sys.path],
            filters=_warning_filters(),
        )
        self.is_open = True
        found = self._ask(command, _JOIN_S)
        if found.failed:
            raise self._failure(found, "joining the process group")

    def call(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        drawn: Mapping[str, Any] | None = None,
        remake: tuple[str, ...] = (),
        keep: bool = True,
        kind: str = "argument",
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
            keep: whether what it returns is sent back; None stands for it otherwise.
            kind: what an argument is called in messages.
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
            changing = pack(function, (), drawn, by_value, kind=kind, alone=True)
        if drawn is not None and self._packed is not None and self._packed[0] is function:
            payload = self._packed[1]
        else:
            payload = pack(function, args, kwargs or {}, by_value, kind=kind)
            self._packed = None if drawn is None else (function, payload)
        if not self.is_open:
            self.open()
        command = Call(
            payload=payload,
            drawn=changing,
            seed=0,
            remake=remake,
            keep=keep,
            verbosity=verbosity,
        )
        found = self._ask(command, self._timeout_s)
        if (wish := found.unanimous(self.size)) is not None:
            raise UnanimousOutcome(wish.outcome, wish.reason)
        if found.failed:
            raise self._failure(found)
        values = [rank.value() for rank in self._ranks]
        return [value.load() for value in values if value is not None]

    def close(self) -> dict[int, dict[str, list[str]]]:
        """Leave the group on all ranks; return what each left behind, by rank and kind."""
        __tracebackhide__ = True
        if not self.is_open:
            return {}
        found = self._ask(Close(), _LEAVE_S)
        if found.failed:
            raise self._failure(found, "leaving the process group")
        self._forget()
        replies = {n: r for n, r in sorted(found.replies.items()) if isinstance(r, Closed)}
        self._pool.discard([number for number, reply in replies.items() if not reply.reusable])
        return {number: reply.leaks for number, reply in replies.items() if reply.leaks}

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
        return {rank.rank: text_from(rank.log.path) for rank in self._ranks}

    def _forget(self) -> None:
        self.is_open = False
        if self._store is not None:
            self._store.unlink(missing_ok=True)

    def _ask(self, command: Command, timeout_s: float) -> _Replies:
        grace_s = self._pool.grace_s
        return self._pool.monitor.ask(self._ranks, command, timeout_s=timeout_s, grace_s=grace_s)

    def _failure(self, found: _Replies, doing: str = "") -> RankFailure:
        """Gather all that is known, end the ranks, and return the report."""
        stacks = self._pool.monitor.raw_stacks(found.waiting, _STACKS_S)
        findings = Findings(
            world=self.size,
            doing=doing,
            raised={number: reply.text for number, reply in found.raised.items()},
            summaries={number: reply.summary for number, reply in found.raised.items()},
            died=found.died,
            crashes={n: readable_threads(text_from(self._ranks[n].stack_path)) for n in found.died},
            waiting={
                rank.rank: readable_threads(stacks.get(rank.rank, "")) or _SILENT
                for rank in found.waiting
            },
            waited=found.waited,
            output=self.output(),
        )
        self.abandon()
        has_stalled = found.waiting and not found.died and not found.raised
        return (RankStall if has_stalled else RankFailure)(findings)


def _group_timeout_s(timeout_s: float) -> float:
    """Deadline of a collective: a bit before that of the test, so that it can tell its own story.

    Joining the group has this much time too, so a short test leaves the word to the pool.
    """
    return timeout_s - 2.0 if timeout_s >= 6.0 else 30.0


def _warning_filters() -> bytes:
    """Pickle the warning filters in force here, leaving out those that cannot travel."""
    kept: list[Any] = []
    for entry in warnings.filters:
        with contextlib.suppress(Exception):
            cloudpickle.dumps(entry)
            kept.append(entry)
    return cloudpickle.dumps(kept)

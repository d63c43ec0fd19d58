"""One process group over ranks of the pool, for one call or for many.

Many calls in one group are what drawn examples need: making a group costs far more than a call.
After a failure the ranks are gone; the next call starts new ones and a new group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from unisono.testing.harvest import Harvest, Rank, gather_replies
from unisono.testing.messages import Call, Close, Closed, Command, Open, Returned
from unisono.testing.nursery import absolute_path
from unisono.testing.rank_files import STACK_SIGNAL, output_file, stack_file
from unisono.testing.report import Findings, RankFailure
from unisono.testing.shipping import pack, pack_drawn
from unisono.testing.stacks import readable_stacks

if TYPE_CHECKING:
    from unisono.testing.pool import RankPool

T = TypeVar("T")

_JOIN_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 20.0
_STACK_TIMEOUT_S = 0.5


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


class RankWorld:
    """A world of ranks of a pool; get one from `RankPool.open`.

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
        self._ranks: list[Rank] = []
        self._store: Path | None = None
        self._packed: tuple[Callable[..., Any], bytes] | None = None

    def open(self) -> None:
        """Join a fresh process group on all ranks; `call` does it when needed."""
        __tracebackhide__ = True
        self._ranks = self._pool.take(self.size)
        directory = self._pool.directory
        for rank in self._ranks:
            for file in (output_file(directory, rank.number), stack_file(directory, rank.number)):
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
            path=absolute_path(),
            filters=_warning_filters(),
        )
        self.is_open = True
        harvest = self._command(command, _JOIN_TIMEOUT_S)
        if harvest.failed:
            raise self._failure(harvest, "joining the process group")

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
        by_value = self._pool.by_value()
        changing = b""
        if drawn is not None:
            changing = pack_drawn(function, drawn, by_value=by_value, kind=kind)
        if drawn is not None and self._packed is not None and self._packed[0] is function:
            payload = self._packed[1]
        else:
            payload = pack(function, args, kwargs or {}, by_value=by_value, kind=kind)
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
        harvest = self._command(command, self._timeout_s)
        if (wish := harvest.unanimous()) is not None:
            raise UnanimousOutcome(wish.outcome, wish.reason)
        if harvest.failed:
            raise self._failure(harvest)
        replies = [harvest.replies[rank] for rank in range(self.size)]
        return [cloudpickle.loads(r.payload) for r in replies if isinstance(r, Returned)]

    def close(self) -> dict[int, dict[str, list[str]]]:
        """Leave the group on all ranks; return what each left behind, by rank and kind."""
        __tracebackhide__ = True
        if not self.is_open:
            return {}
        harvest = self._command(Close(), _LEAVE_TIMEOUT_S)
        if harvest.failed:
            raise self._failure(harvest, "leaving the process group")
        self._forget()
        replies = {n: r for n, r in sorted(harvest.replies.items()) if isinstance(r, Closed)}
        self._pool.discard(number for number, reply in replies.items() if not reply.reusable)
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
        texts: dict[int, str] = {}
        for number in range(self.size):
            with contextlib.suppress(OSError):
                file = output_file(self._pool.directory, number)
                texts[number] = file.read_text(errors="replace")
        return texts

    def _forget(self) -> None:
        self.is_open = False
        if self._store is not None:
            self._store.unlink(missing_ok=True)

    def _command(self, command: Command, timeout_s: float) -> Harvest:
        message = pickle.dumps(command)
        for rank in self._ranks:
            # A dead rank is found by the one who listens.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.conn.send_bytes(message)
        return gather_replies(
            self._ranks,
            timeout_s=timeout_s,
            grace_s=self._pool.grace_s,
            bury=self._pool.bury,
        )

    def _failure(self, harvest: Harvest, doing: str = "") -> RankFailure:
        """Gather all that is known, end the ranks, and return the report."""
        findings = Findings(
            world=self.size,
            doing=doing,
            raised={number: reply.text for number, reply in harvest.raised.items()},
            summaries={number: reply.summary for number, reply in harvest.raised.items()},
            died=harvest.died,
            crashes={number: self._stacks_of(number) for number in harvest.died},
            waiting=self._ask_for_stacks(harvest.waiting),
            waited=harvest.waited,
            output=self.output(),
        )
        self.abandon()
        return (RankStall if harvest.stalled else RankFailure)(findings)

    def _ask_for_stacks(self, numbers: list[int]) -> dict[int, str]:
        pids = {rank.number: rank.pid for rank in self._ranks}
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[number], STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        before: dict[int, str] = {}
        while time.monotonic() < deadline:
            time.sleep(0.03)
            now = {number: self._stacks_of(number) for number in numbers}
            if now == before and all(now.values()):
                break
            before = now
        silent = "(the process did not answer: it is stopped or in an uninterruptible call)"
        return {number: text or silent for number, text in before.items()}

    def _stacks_of(self, number: int) -> str:
        try:
            file = stack_file(self._pool.directory, number)
            return readable_stacks(file.read_text(errors="replace"))
        except OSError:
            return ""


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

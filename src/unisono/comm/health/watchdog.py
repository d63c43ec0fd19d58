"""One daemon thread per process that lets ranks learn about each other while they are blocked.

Through the world's store it answers other ranks' requests for stacks and notices a failure that a
rank has posted; it also looks after transfers on streams (`streams.py`). It starts with the first
group of more than one rank and ends with the world. All that it leaves in the store is signed
(`seal.py`), and what is not signed is not there for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from unisono.comm import call as calls
from unisono.comm import seal
from unisono.comm.call import thread_stacks
from unisono.comm.machine import condition_of, own_card
from unisono.errors import RankFailed
from unisono.torch_private import default_store

if TYPE_CHECKING:
    from unisono.comm.health.streams import Lane

POLL_S = 1.0
"""Seconds between two looks at the store."""
ANSWER_S = 3.0
"""Longest time to wait for other ranks' answers."""

TICK_S = 0.1
"""Seconds between two looks at transfers under way on streams."""

lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
"""What groups have under way on streams of devices (`streams.py`), in this process."""

_TOLD = ("done", "op", "sends_to", "receives_from")
"""Fields of the latest call that other ranks may ask for."""
_NAP_S = 2e-3
_NAME = "unisono-watchdog"
_PREFIX = "unisono/watch"
_lock = threading.Lock()
_current: Watchdog | None = None
_soon: threading.Timer | None = None
"""Starts the watchdog of a world in which this rank has made no call yet."""
_standing: dict[str, Watchdog] = {}
"""Watchdogs of groups that do not belong to the default process group, by the groups' keys."""
_inherited: dist.ProcessGroup | None = None
"""The world of the process from which this one was forked."""


class Watchdog:
    """Answers requests and watches for failures, for ranks that share a store.

    Args:
        rank: own rank, as reports name it.
        ranks: all ranks that share the store.
        store: their store.
        is_over: whether they have parted, so that no rank asks any more.
        signed_by: signs what this rank leaves in the store; default: the seal of the world.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        store: Store,
        is_over: Callable[[], bool],
        signed_by: seal.Seal | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.failure: RankFailed | None = None
        self._is_over = is_over
        self._store = PrefixStore(_PREFIX, own_connection(store))
        self.seal = signed_by or seal.of_world()
        self._store_lock = threading.Lock()
        self._stop = threading.Event()
        self._awake = threading.Event()
        self._cards: dict[int, list[str | int]] = {}
        self._answered = 0
        self._news: list[dict[str, Any]] = []
        self._news_read = 0
        self.has_failed = False
        """Whether this rank has posted a failure of its own."""
        self.has_returned = False
        """Whether this rank has said that its function has returned."""
        self.put(f"process/{self.rank}", own_card())
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether this watchdog still runs for ranks that have not parted."""
        return not self._is_over() and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread and wait for its end."""
        self._stop.set()
        self._awake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)

    def post_failure(self, error: BaseException) -> None:
        """Tell all ranks that this one failed; the first failure posted stays."""
        record = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "error": f"{type(error).__name__}: {error}",
            "traceback": "".join(traceback.format_exception(error)),
        }
        self.has_failed = True
        with self._store_lock:
            text = self._signed("failed", record)
            posted = bytes(self._store.compare_set("failed", "", text))  # type: ignore[arg-type]
            if self.seal.verified(posted, "failed") is None:
                self._set("failed", record)  # what is there is not signed by a rank

    def poll_failure(self) -> RankFailed | None:
        """Look for a failure posted by another rank."""
        if self.failure is None:
            with self._store_lock:
                posted = self._get("failed")
            if posted is not None and posted["rank"] != self.rank:
                self.failure = failure_of(posted, len(self.ranks))
        return self.failure

    def put(self, key: str, record: Any) -> None:
        """Leave plain data for all ranks; a store that has gone takes nothing."""
        with self._store_lock, contextlib.suppress(RuntimeError):
            self._set(key, record)

    def find(self, key: str) -> Any:
        """Return what a rank has left, or None."""
        with self._store_lock, contextlib.suppress(RuntimeError):
            return self._get(key)
        return None

    def publish(self, record: dict[str, Any]) -> None:
        """Add a record to the news of this world, which all ranks read in one order."""
        with self._store_lock, contextlib.suppress(RuntimeError):
            number = self._store.add("news", 1)
            self._set(f"news/{number}", record)

    def news(self) -> list[dict[str, Any]]:
        """Return all records published so far; each is fetched once."""
        with self._store_lock, contextlib.suppress(RuntimeError):
            while self._has(key := f"news/{self._news_read + 1}"):
                self._news_read += 1
                if (record := self._get(key)) is not None:
                    self._news.append(record)
        return self._news

    def share(
        self, key: str, record: dict[str, Any], ranks: Sequence[int], timeout_s: float
    ) -> dict[int, dict[str, Any]]:
        """Return what `ranks`, this one among them, leave under `key`, of those that come in time.

        The last reader removes it.
        """
        self.put(f"{key}/{self.rank}", record)
        records: dict[int, dict[str, Any]] = {}
        give_up = time.monotonic() + timeout_s
        while missing := [rank for rank in ranks if rank not in records]:
            arrived = {rank: self.find(f"{key}/{rank}") for rank in missing}
            records |= {rank: other for rank, other in arrived.items() if other is not None}
            if time.monotonic() > give_up:
                return records
            if len(records) < len(ranks):
                time.sleep(_NAP_S)
        with self._store_lock, contextlib.suppress(RuntimeError):
            if self._store.add(f"{key}/read", 1) == len(ranks):
                for name in (*ranks, "read"):
                    self._store.delete_key(f"{key}/{name}")
        return records

    def ask_stacks(self) -> dict[int, dict[str, Any]]:
        """Collect stacks and latest collective of all other ranks that answer in time.

        Those that have no watchdog, or are dead or stopped, are not waited for.
        """
        with self._store_lock:
            number = self._store.add("requests", 1)
            self._set(f"request/{number}", self.rank)
        answers: dict[int, dict[str, Any]] = {}
        give_up = time.monotonic() + ANSWER_S
        others = [rank for rank in self.ranks if rank != self.rank]
        able = {rank for rank in others if self.condition(rank) == "alive"}
        while able - answers.keys() and time.monotonic() < give_up:
            self._poll()  # two ranks may ask each other at the same time
            arrived = {r: self.find(f"answer/{number}/{r}") for r in others if r not in answers}
            answers |= {rank: answer for rank, answer in arrived.items() if answer is not None}
            if able - answers.keys():
                time.sleep(0.02)
        return answers

    def wake(self) -> None:
        """Have the thread look now: something is under way on a stream."""
        self._awake.set()

    def card(self, rank: int) -> list[str | int] | None:
        """Return what the process of a rank has said of itself (`machine.own_card`), if it has."""
        if rank not in self._cards and (card := self.find(f"process/{rank}")) is not None:
            self._cards[rank] = card
        return self._cards.get(rank)

    def condition(self, rank: int) -> str:
        """Return how the process of a rank is, by its card; `unknown` if it has left none."""
        card = self.card(rank)
        return "unknown" if card is None else condition_of(card)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _signed(self, key: str, record: Any) -> bytes:
        return self.seal.sign(json.dumps(record).encode(), key)

    def _set(self, key: str, record: Any) -> None:
        self._store.set(key, self._signed(key, record))  # type: ignore[arg-type]

    def _get(self, key: str) -> Any:
        """Return what is there; None if no rank of this world has written it."""
        body = (
            self.seal.body_if_signed(bytes(self._store.get(key)), key) if self._has(key) else None
        )
        return None if body is None else json.loads(body)

    def _run(self) -> None:
        next_poll, has_store = time.monotonic() + POLL_S, True
        while True:
            watched = [lane for lane in list(lanes) if of(lane.key) is self]
            is_busy = any(lane.is_busy for lane in watched)
            is_awakened = self._awake.wait(TICK_S if is_busy else POLL_S)
            self._awake.clear()
            if self._stop.is_set() or self._is_over():
                return
            if is_awakened:
                continue  # transfers need not be looked at before a tick has passed
            for lane in watched:
                with contextlib.suppress(RuntimeError, OSError):  # calls of this rank will say so
                    lane.look()
            if has_store and time.monotonic() >= next_poll:
                next_poll = time.monotonic() + POLL_S
                try:
                    self._poll()
                    for lane in watched:
                        lane.hear(self)
                except (RuntimeError, OSError, ValueError):
                    has_store = False  # it is gone: the world has ended without us
            if not has_store and not is_busy:
                return

    def _poll(self) -> None:
        self.poll_failure()
        with self._store_lock:
            while self._has(key := f"request/{self._answered + 1}"):
                asker = self._get(key)
                self._answered += 1
                if asker not in (None, self.rank):
                    self._set(f"answer/{self._answered}/{self.rank}", describe_self())


def own_connection(store: Store) -> Store:
    """Return a connection of our own where a blocked call would lock the shared one."""
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, TCPStore):
        return store.clone()  # type: ignore[attr-defined]
    return store


def describe_self() -> dict[str, Any]:
    """Return what this process tells others about itself."""
    from unisono.comm.groups import collectives_begun  # which imports this module

    latest = calls.latest_call
    call = latest or calls.Call("", "", "", done=True)
    return {
        "stacks": thread_stacks(),
        "site": calls.thread_site(threading.main_thread().ident or 0),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "call": None if latest is None else latest.describe(),
        "group": call.key,
        "begun": collectives_begun(),
        **{name: getattr(call, name) for name in _TOLD},
    }


def failure_of(posted: dict[str, Any], size: int) -> RankFailed:
    """Build the error that the other ranks raise from a posted record."""
    message = (
        f"rank {posted['rank']} of {size} on {posted['host']} raised {posted['error']}\n"
        f"{posted['traceback'].rstrip()}"
    )
    return RankFailed(
        message, rank=posted["rank"], host=posted["host"], traceback=posted["traceback"]
    )


def ensure() -> Watchdog | None:
    """Return the watchdog of the default process group, started if needed; None at one rank.

    None also in a process that was forked from a rank: it must not speak for that rank.
    """
    global _current
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() < 2 or world is _inherited:
        return None
    with _lock:
        if _current is None or not _current.is_alive:
            if _current is not None:
                _current.stop()
            _current = Watchdog(
                world.rank(),
                range(world.size()),
                default_store(),
                lambda: not dist.is_initialized() or dist.group.WORLD is not world,
            )
            _cancel_start()
        return _current


def ensure_soon() -> None:
    """Have this rank answer for itself a little later, also if it makes no call.

    For groups of the world that are made while torch.distributed does not know that yet.
    """
    global _soon
    _soon = threading.Timer(POLL_S, ensure)
    _soon.name, _soon.daemon = _NAME, True
    _soon.start()


def _cancel_start() -> None:
    global _soon
    if _soon is not None:
        _soon.cancel()
        _soon = None


def current() -> Watchdog | None:
    """Return the watchdog of the default process group if it runs; starts nothing."""
    dog = _current
    return dog if dog is not None and dog.is_alive else None


def stand(key: str, dog: Watchdog) -> None:
    """Let `dog` serve the group `key`, which does not belong to the default process group."""
    _standing[key] = dog


def dismiss(key: str) -> None:
    """End the service of a group's own watchdog, and the watchdog with its last group."""
    dog = _standing.pop(key, None)
    if dog is not None and dog not in _standing.values():
        dog.stop()


def standing() -> list[Watchdog]:
    """Return the watchdogs of groups outside of the default process group."""
    return list(dict.fromkeys(_standing.values()))


def running() -> list[Watchdog]:
    """Return all watchdogs of this process; starts none."""
    dog = current()
    return standing() if dog is None else [*standing(), dog]


def _standing_for(key: str) -> Watchdog | None:
    # Calls of torch.distributed on a group have more words in their keys, after a slash.
    return _standing.get(key.partition("/")[0])


def of(key: str) -> Watchdog | None:
    """Return the watchdog to which the ranks of a group answer if it runs; starts nothing."""
    return _standing_for(key) or current()


def serving(key: str) -> Watchdog | None:
    """Return the watchdog to which the ranks of a group answer, started if needed."""
    return _standing_for(key) or ensure()


def seal_of(key: str) -> seal.Seal:
    """Return the seal by which the ranks of a group know each other. Local."""
    dog = _standing_for(key)
    return seal.of_world() if dog is None else dog.seal


def stop() -> None:
    """End the watchdog of the default process group, if any."""
    global _current
    with _lock:
        _cancel_start()
        if _current is not None:
            _current.stop()
            _current = None


def _forget_after_fork() -> None:
    global _current, _inherited, _lock, _soon
    _current = _soon = None  # their threads stayed in the parent
    _standing.clear()
    _inherited = dist.group.WORLD if dist.is_initialized() else None
    _lock = threading.Lock()


atexit.register(stop)
os.register_at_fork(after_in_child=_forget_after_fork)

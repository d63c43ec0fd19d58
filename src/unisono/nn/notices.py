"""Notices of mode "on_change": how a change that only some ranks see ends in one error on all.

A rank that sees a change says so in the world's store and waits for the others to say the same. A
rank that has entered the call with its old plan finds the notice within a second (the watchdog
looks) and says that; the first then joins the old plan with zeros, so that nobody is left waiting.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from typing import TYPE_CHECKING, Any

from unisono.comm import Communicator
from unisono.comm.health import watchdog
from unisono.comm.health.watchdog import Watchdog
from unisono.errors import CollectiveMismatch

if TYPE_CHECKING:
    from unisono.nn.module import Module

_FIRST_NAP_S, _LAST_NAP_S = 0.005, 0.2
_counters: weakref.WeakKeyDictionary[object, itertools.count[int]] = weakref.WeakKeyDictionary()
"""For each process group, the number of its next layer."""
_live: dict[int, weakref.ref[Notices]] = {}
_unheard: weakref.WeakSet[Notices] = weakref.WeakSet()
"""Those with an error that this rank has not raised yet."""


class Notices:
    """The calls of one layer, and what other ranks have said about them.

    Made by all ranks of the layer in the same order, so that its number means the same to all.

    Args:
        comm: all ranks of the layer.
        layer: the layer.
    """

    def __init__(self, comm: Communicator, layer: Module) -> None:
        self.comm = comm
        self.group = f"nn/{comm.group_name}"
        self.number = next(_counters.setdefault(comm.process_group(), itertools.count()))
        self.layer = weakref.ref(layer)
        self._calls = 0
        self._changed_at = 0
        self._error: CollectiveMismatch | None = None
        key = id(self)
        _live[key] = weakref.ref(self, lambda _: _live.pop(key, None))

    def begin(self, layer: Module, input: tuple[Any, ...], *, changed: bool) -> None:
        """Number this call; where this rank sees a change, wait until all have said what they see.

        Raises:
            CollectiveMismatch: some rank saw no change.
        """
        self.check()
        number = self._calls + 1
        if changed:
            self._changed_at = number  # before the call counts: the watchdog may be looking
        self._calls = number
        dog = watchdog.serving(str(self.comm.group_name)) if changed else None
        if dog is None:
            return
        old, new = layer._described(None), layer._described(input)
        self._put(dog, "changed", number, f"{old} -> {new}")
        deadline = time.monotonic() + self.comm.timeout_s
        nap_s = _FIRST_NAP_S
        kept = self._said(dog, "kept", number, number)
        while len(kept) + len(self._said(dog, "changed", number, number)) < self.comm.size - 1:
            if time.monotonic() > deadline or self._has_lost_somebody(dog):
                break  # what follows will say who is missing, and where everybody stands
            time.sleep(nap_s)
            nap_s = min(1.5 * nap_s, _LAST_NAP_S)
            kept = self._said(dog, "kept", number, number)
        if kept:
            layer._stand_in()
            raise self._mismatch({self.comm.rank: (number, f"{old} -> {new}")}, kept)

    def check(self) -> None:
        """Raise if another rank has seen a change in a call that this rank made by its old plan.

        Of any layer: a call that needs nothing of the other rank has returned before it is known.
        """
        while _unheard:
            notices = _unheard.pop()
            error, notices._error = notices._error, None
            if error is not None:
                raise error

    def look(self, dog: Watchdog) -> None:
        """Look for changes that this rank has not seen; called by the watchdog."""
        layer = self.layer()
        changed = self._said(dog, "changed", self._changed_at + 1, self._calls)
        if layer is None or not changed:
            return
        number, shape = max(call for call, _ in changed.values()), layer._described(None)
        self._error = self._mismatch(changed, {self.comm.rank: (number, shape)})
        _unheard.add(self)
        self._changed_at = number  # said once
        self._put(dog, "kept", number, shape)

    def _has_lost_somebody(self, dog: Watchdog) -> bool:
        """Whether a rank of the layer has failed or returned, and so may have nothing to say."""
        gone = {item["returned"] for item in dog.news() if "returned" in item}
        return dog.poll_failure() is not None or not gone.isdisjoint(self.comm.ranks)

    def _put(self, dog: Watchdog, what: str, call: int, text: str) -> None:
        record = {"layer": self.number, "call": call, "text": text}
        dog.put(f"{self.group}/{what}/{self.comm.rank}", json.dumps(record))

    def _said(self, dog: Watchdog, what: str, first: int, last: int) -> dict[int, tuple[int, str]]:
        """Return what other ranks have said of the calls from `first` to `last`: call and text."""
        found: dict[int, tuple[int, str]] = {}
        for rank in range(self.comm.size):
            text = dog.find(f"{self.group}/{what}/{rank}") if rank != self.comm.rank else None
            record = json.loads(text) if text is not None else None
            if record and record["layer"] == self.number and first <= record["call"] <= last:
                found[rank] = record["call"], record["text"]
        return found

    def _mismatch(
        self, changed: dict[int, tuple[int, str]], kept: dict[int, tuple[int, str]]
    ) -> CollectiveMismatch:
        layer = self.layer()
        ranks = self.comm.ranks
        lines = [f"rank {ranks[rank]}: {text}" for rank, (_, text) in changed.items()]
        lines += [f"rank {ranks[rank]}: {text}, as before" for rank, (_, text) in kept.items()]
        return CollectiveMismatch(
            "\n    ".join([f"{type(layer).__name__}: an input has changed", *lines])
            + "\n  not all ranks saw it, and in mode on_change each acts on what it sees"
            + '\n  HINT: unisono.nn.structure_check("always")'
        )


def _look(dog: Watchdog) -> None:
    for made in list(_live.values()):
        notices = made()
        if notices is not None:
            notices.look(dog)


watchdog.looks.append(_look)

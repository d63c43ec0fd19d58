"""A rank that waits for a message of another one, which waits for the first in a collective.

Calls of one kind are compared by their numbers; these two have none in common. So a rank that has
waited for long for a message tells its sender what it has made so far, and a sender that waits in a
collective finds that neither wait can end. Judged only where no other thread of the two ranks could
still send the message or join the collective.
"""

from __future__ import annotations

import json
import threading
from types import ModuleType
from typing import Any

from unisono.comm import call as calls
from unisono.comm import watchdog
from unisono.comm.call import Call, sent_to
from unisono.comm.sites import thread_site
from unisono.comm.watchdog import Watchdog

_MOST_SENDERS = 64
"""Senders that are told, so that a message from each of very many ranks costs the store little."""
_MAKES_NO_CALLS = ("unisono", "tqdm_monitor", "pytest_timeout")
"""Starts of the names of threads that only look after things."""


def tell_senders(call: Call, dog: Watchdog, ident: int, site: str) -> None:
    """Tell the ranks whose messages `call` awaits that thread `ident` of this rank waits for them.

    Said again at every look: two ranks that wait for the same one have one place for it.
    """
    if not call.awaits or not _is_alone(ident):
        return
    record = {
        "rank": dog.rank,
        "text": f"{call.describe()} at {site}",
        "key": call.key,
        "awaits": call.awaits,
        "made": _groups().collectives_begun(),
    }
    text = json.dumps(record)
    for sender, _, _ in call.awaits[:_MOST_SENDERS]:
        dog.put(f"wanted/{sender}", text)


def find_receiver(call: Call, dog: Watchdog) -> dict[str, Any] | None:
    """Return what a rank said that `call`, a collective, needs and that waits for this rank."""
    if not _needs_everybody(call) or not _is_alone(threading.get_ident()):
        return None
    text = dog.find(f"wanted/{dog.rank}")
    said = json.loads(text) if text is not None else None
    if said is None or said["made"].get(call.key, call.number) >= call.number:
        return None  # not a member, or already in the collective
    sent = _groups().accounts().get(said["key"], {})
    never_sent = any(
        sender == dog.rank and sent.get(sent_to(said["rank"], tag), 0) < number
        for sender, tag, number in said["awaits"]
    )
    return said if never_sent else None


def _needs_everybody(call: Call) -> bool:
    """Whether no rank can leave this collective before all have come."""
    is_rooted = call.root is not None
    return not is_rooted and call.op != "all_to_all" and 0 not in (call.sizes or ())


def _is_alone(ident: int) -> bool:
    """Whether thread `ident` is the only one of this process that may make calls of its own."""
    return all(
        thread.ident == ident or thread.name.startswith(_MAKES_NO_CALLS)
        for thread in threading.enumerate()
    )


def _groups() -> ModuleType:
    from unisono.comm import groups  # which imports the engines, whose waits ask here

    return groups


def _look(dog: Watchdog) -> None:
    """Speak for a thread that cannot: one blocked in a message inside a backend."""
    blocked = calls.blocked()
    if blocked is not None:
        call, ident = blocked
        if dog not in (watchdog.standing(call.key) or [watchdog.current()]):
            return
        tell_senders(call, dog, ident, thread_site(ident))


watchdog.looks.append(_look)

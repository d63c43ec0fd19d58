"""Whether a wait can still end, from what the other ranks have said in the world's store.

A rank that has waited for long says in which call; one whose function has returned says how many
calls it has made and messages it has sent. So ranks in different calls, and a rank that makes none
any more, are named long before the deadline. Asked in long waits only: a quick collective pays for
counting, nothing else.

A message and a collective have no numbers in common. So a rank that has waited for long for a
message tells its sender what it has made so far, and a sender that waits in a collective finds that
neither wait can end. Judged only where no other thread of the two ranks could still send the
message or join the collective.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from unisono.comm import call as calls
from unisono.comm.call import Call, sent_to, thread_site
from unisono.comm.health import watchdog
from unisono.comm.health.watchdog import Watchdog
from unisono.errors import CollectiveMismatch, UnisonoError, name_ranks

_COMPARED = ("op", "kind", "root")
_COMPARED_IF_KNOWN = ("device", "signature")
"""Facts of calls on tensors; None where a rank brings none."""
_ONE_DEVICE = "x.to(device) on all ranks: each kind of device has a backend of its own"
_EXPLAIN_S = 1.0
"""Longest time to wait for the words of ranks that raise the same error at the same time."""
_MOST_SENDERS = 64
"""Senders that are informed: messages from very many ranks must cost the store little."""
_NAP_S = 0.01
_MAKES_NO_CALLS = ("unisono", "tqdm_monitor", "pytest_timeout")
"""Starts of the names of threads that only look after things."""


def obstacle_to(call: Call | None = None) -> UnisonoError | None:
    """Return why `call` cannot complete on this rank, if that is known; asks the store.

    None, without starting anything, where the world has ended or is being closed.

    Args:
        call: a call under way; default: the one that this rank waits for.
    """
    call = call or calls.waited()
    dog = watchdog.current() if call is None else watchdog.of(call.key)
    if dog is None:
        return None
    try:
        if call is None or dog.has_returned:
            return dog.poll_failure()
        if call.number == 0:
            _tell_senders(call, dog, threading.get_ident(), call.site)
            return (
                _sender_in_collective(call, dog)
                or dog.poll_failure()
                or _missed_by_returned(call, dog)
            )
        # A rank that fails of a mismatch posts that: all are to raise the mismatch itself. One that
        # returns early may do so because of a failure, which is then the better reason.
        return _unlike_calls(call, dog) or dog.poll_failure() or _missed_by_returned(call, dog)
    except RuntimeError:
        return None


def announce_return(accounts: Mapping[str, Mapping[str, int]]) -> None:
    """Tell the other ranks that this one makes no more collectives. Said once in a world.

    Args:
        accounts: for each group of this rank, how many it has made, and what else was counted.
    """
    for dog in watchdog.running():
        if not dog.has_returned:
            dog.has_returned = True
            dog.publish({"returned": dog.rank, "accounts": accounts})


# -- ranks in different calls ---------------------------------------------------------------------


def _unlike_calls(call: Call, dog: Watchdog) -> CollectiveMismatch | None:
    """Compare this rank's call with what others wait in; leave it to be compared with.

    One record per group, whatever the number of ranks: the latest call in which a rank waits.
    """
    record = {
        "rank": dog.rank,
        "number": call.number,
        "op": call.op,
        "kind": call.kind,
        "root": call.root,
        "text": f"{call.describe()} at {call.site}",
        "device": call.device,
        "signature": call.signature and list(call.signature),
    }
    for item in dog.news():
        if (item.get("group"), item.get("number")) == (call.key, call.number):
            return _mismatch([*item["calls"], record], call)
    key = f"waits/{call.key}"
    text = dog.find(key)
    theirs = json.loads(text) if text is not None else None
    if theirs is None or theirs["number"] < call.number:
        dog.put(key, json.dumps(record))
    elif theirs["number"] == call.number and _are_unlike(theirs, record):
        return _publish([theirs, record], call, dog)
    receiver = _waiting_receiver(call, dog)
    return None if receiver is None else _publish([receiver, record], call, dog)


def _are_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return any(one[k] != other[k] for k in _COMPARED) or any(
        None not in (one[k], other[k]) and one[k] != other[k] for k in _COMPARED_IF_KNOWN
    )


def _publish(pair: list[dict[str, Any]], call: Call, dog: Watchdog) -> CollectiveMismatch:
    """Return the error for two calls that cannot end; let the other ranks raise it too."""
    dog.publish({"group": call.key, "number": call.number, "calls": pair})
    return _mismatch(pair, call)


def _mismatch(said: list[dict[str, Any]], call: Call) -> CollectiveMismatch:
    texts = {item["rank"]: item["text"] for item in said}
    lines = [f"ranks of {call.group} wait for each other in different calls"]
    lines += [f"  rank {rank} | {text}" for rank, text in sorted(texts.items())]
    hint = "different numbers of batches? All ranks must make the same collectives, in order"
    devices = {item.get("device") for item in said} - {None}
    lines.append(f"  HINT: {_ONE_DEVICE if len(devices) > 1 else hint}")
    return CollectiveMismatch("\n".join(lines), texts)


def explained(error: CollectiveMismatch, call: Call, ranks: Sequence[int]) -> CollectiveMismatch:
    """Return the error of a broken group with the call and the source line of every rank.

    All ranks raise it at the same time, so each tells the others what it has called.
    """
    dog = watchdog.of(call.key)
    is_full = not error.calls or call.describe() in str(error)  # a message, or told by a wait
    if dog is None or is_full or len(ranks) > _MOST_SENDERS:
        return error
    key, deadline = f"unlike/{call.key}", time.monotonic() + _EXPLAIN_S
    said = {dog.rank: {"text": f"{call.describe()} at {call.site}", "device": call.device}}
    dog.put(f"{key}/{dog.rank}", json.dumps(said[dog.rank]))
    while missing := [rank for rank in ranks if rank not in said]:
        texts = {rank: dog.find(f"{key}/{rank}") for rank in missing}
        said |= {rank: json.loads(text) for rank, text in texts.items() if text is not None}
        if time.monotonic() > deadline:
            break
        time.sleep(_NAP_S)
    made = {rank: f" | {said[rank]['text']}" for rank in ranks if rank in said}
    lines = [str(error).partition("\n")[0]]
    lines += [f"  rank {rank}: {text}{made.get(rank, '')}" for rank, text in error.calls.items()]
    devices = {item["device"] for item in said.values()} - {None}
    hint = str(error).partition("HINT: ")[2]
    if not hint or "adds the source line" in hint:  # which is there already
        hint = "all ranks must make the same collectives in the same order"
    lines.append(f"  HINT: {_ONE_DEVICE if len(devices) > 1 else hint}")
    return CollectiveMismatch("\n".join(lines), error.calls)


# -- a message against a collective ---------------------------------------------------------------


def _tell_senders(call: Call, dog: Watchdog, ident: int, site: str) -> None:
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


def _waiting_receiver(call: Call, dog: Watchdog) -> dict[str, Any] | None:
    """Return what a rank said that `call`, a collective, needs and that waits for this rank."""
    can_leave_early = call.root is not None or call.op == "all_to_all" or 0 in (call.sizes or ())
    if can_leave_early or not _is_alone(threading.get_ident()):
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


def _sender_in_collective(call: Call, dog: Watchdog) -> CollectiveMismatch | None:
    """Look whether a rank that this message should come from waits in a collective for this one."""
    awaited = [dog.rank, call.key, [list(words) for words in call.awaits]]
    for item in dog.news():
        for said in item.get("calls", ()):
            if [said["rank"], said.get("key"), said.get("awaits")] == awaited:
                return _mismatch(item["calls"], call)
    return None


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
        if dog is watchdog.of(call.key):
            _tell_senders(call, dog, ident, thread_site(ident))


watchdog.looks.append(_look)


# -- ranks that have returned ---------------------------------------------------------------------


def _missed_by_returned(call: Call, dog: Watchdog) -> CollectiveMismatch | None:
    """Look for ranks that have returned before they came to this call, or sent what it awaits."""
    awaited = {rank: (tag, number) for rank, tag, number in call.awaits}
    late: dict[int, Mapping[str, int]] = {}
    texts: dict[int, str] = {}
    for item in dog.news():
        rank, made = item.get("returned"), item.get("accounts", {}).get(call.key)
        if made is None or rank is None:
            continue
        if call.number and made["collectives"] < call.number:
            late[rank], count = made, made["collectives"]
            texts[rank] = f"returned after {count} calls of {call.group}"
        elif rank in awaited:
            tag, number = awaited[rank]
            if (sent := made.get(sent_to(dog.rank, tag), 0)) < number:
                late[rank] = made
                texts[rank] = (
                    f"returned after {sent} messages to rank {dog.rank}, "
                    f"which waits for message {number}"
                )
    if not late:
        return None
    here = f"{call.describe()} at {call.site}"
    will_not = f"{name_ranks(list(late))} will not {'come' if call.number else 'send'}"
    lines = [
        f"{here} cannot complete: {will_not}",
        *(f"  rank {rank} {text}" for rank, text in sorted(texts.items())),
        *([f"  rank {dog.rank} is in call {call.number}"] if call.number else []),
        "  HINT: different numbers of batches? All ranks must make the same calls, then return",
    ]
    return CollectiveMismatch("\n".join(lines), {**texts, dog.rank: here}, returned=late)

"""Whether a wait can still end, from what the other ranks have said in the world's store.

A rank that has waited for long says in which call; one whose function has returned says how
many calls it has made and messages it has sent. So ranks in different calls, and a rank that makes
none any more, are named long before the deadline. Asked in long waits only: a quick collective pays
for counting, nothing else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from unisono.comm import call as calls
from unisono.comm import watchdog
from unisono.comm.call import Call, sent_to
from unisono.comm.standoff import find_receiver, tell_senders
from unisono.comm.watchdog import Watchdog
from unisono.errors import CollectiveMismatch, UnisonoError, name_ranks

_COMPARED = ("op", "kind", "root")


def hopeless() -> UnisonoError | None:
    """Return why the wait that this rank is in cannot end, if that is known; asks the store.

    None, without starting anything, where the world has ended or is being closed.
    """
    call = calls.waited()
    own = [] if call is None else watchdog.standing(call.key)
    dog = own[0] if own else watchdog.current()
    if dog is None:
        return None
    try:
        if call is None or dog.has_returned:
            return dog.poll_failure()
        if call.number == 0:
            tell_senders(call, dog, threading.get_ident(), call.site)
            return _stands_off(call, dog) or dog.poll_failure() or _never_sent(call, dog)
        # A rank that fails of a mismatch posts that: all are to raise the mismatch itself. One that
        # returns early may do so because of a failure, which is then the better reason.
        return _unlike_calls(call, dog) or dog.poll_failure() or _waits_in_vain(call, dog)
    except RuntimeError:
        return None


def announce_return(accounts: Mapping[str, Mapping[str, int]]) -> None:
    """Tell the other ranks that this one makes no more collectives. Said once in a world.

    Args:
        accounts: for each group of this rank, how many it has made, and what else was counted.
    """
    dog = watchdog.current()
    for told in [*watchdog.standing(), *([] if dog is None else [dog])]:
        if not told.has_returned:
            told.has_returned = True
            told.publish({"returned": told.rank, "accounts": accounts})


def _unlike_calls(call: Call, dog: Watchdog) -> CollectiveMismatch | None:
    """Compare this rank's call with what others wait in; leave it to be compared with.

    One word a group, whatever the number of ranks: the latest call that anybody waits in.
    """
    mine = _described(call, dog.rank)
    for item in dog.news():
        if (item.get("group"), item.get("number")) == (call.key, call.number):
            return _unlike([*item["calls"], mine], call)
    key = f"waits/{call.key}"
    text = dog.find(key)
    theirs = json.loads(text) if text is not None else None
    if theirs is None or theirs["number"] < call.number:
        dog.put(key, json.dumps(mine))
    elif theirs["number"] == call.number and any(theirs[k] != mine[k] for k in _COMPARED):
        return _reveal([theirs, mine], call, dog)
    receiver = find_receiver(call, dog)
    return None if receiver is None else _reveal([receiver, mine], call, dog)


def _reveal(pair: list[dict[str, Any]], call: Call, dog: Watchdog) -> CollectiveMismatch:
    """Return the error for two calls that cannot end; let the other ranks raise it too."""
    dog.publish({"group": call.key, "number": call.number, "calls": pair})
    return _unlike(pair, call)


def _stands_off(call: Call, dog: Watchdog) -> CollectiveMismatch | None:
    """Look whether a rank that this message should come from waits in a collective for this one."""
    mine = [dog.rank, call.key, [list(words) for words in call.awaits]]
    for item in dog.news():
        for said in item.get("calls", ()):
            if [said["rank"], said.get("key"), said.get("awaits")] == mine:
                return _unlike(item["calls"], call)
    return None


def _waits_in_vain(call: Call, dog: Watchdog) -> CollectiveMismatch | None:
    """Look for ranks that have returned before they came to this call."""
    late = {
        item["returned"]: made
        for item in dog.news()
        if "returned" in item
        and (made := item["accounts"].get(call.key)) is not None
        and made["collectives"] < call.number
    }
    if not late:
        return None
    here = f"{call.describe()} at {call.site}"
    told = {rank: f"returned after {made['collectives']} calls" for rank, made in late.items()}
    lines = [f"{here} waits in vain: {name_ranks(list(late))} will not come"]
    lines += [f"  rank {rank} {text} of {call.group}" for rank, text in sorted(told.items())]
    lines.append(f"  rank {dog.rank} is in call {call.number}")
    lines.append("  HINT: different numbers of batches? All ranks must make the same collectives")
    return CollectiveMismatch("\n".join(lines), {**told, dog.rank: here}, returned=late)


def _never_sent(call: Call, dog: Watchdog) -> CollectiveMismatch | None:
    """Look for ranks that have returned before they sent a message that this call waits for."""
    awaited = {rank: (tag, number) for rank, tag, number in call.awaits}
    late = {}
    for item in dog.news():
        if "returned" not in item or (rank := item["returned"]) not in awaited:
            continue
        made, (tag, number) = item["accounts"].get(call.key), awaited[rank]
        if made is not None and made.get(sent_to(dog.rank, tag), 0) < number:
            late[rank] = made
    if not late:
        return None
    here = f"{call.describe()} at {call.site}"
    told = {}
    for rank, made in late.items():
        tag, number = awaited[rank]
        told[rank] = (
            f"returned after {made.get(sent_to(dog.rank, tag), 0)} messages to rank {dog.rank}, "
            f"which waits for message {number}"
        )
    lines = [f"{here} waits in vain: {name_ranks(list(late))} will not send"]
    lines += [f"  rank {rank} {text}" for rank, text in sorted(told.items())]
    lines.append("  HINT: all ranks must make the same calls before they return")
    return CollectiveMismatch("\n".join(lines), {**told, dog.rank: here}, returned=late)


def _described(call: Call, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "number": call.number,
        "op": call.op,
        "kind": call.kind,
        "root": call.root,
        "text": f"{call.describe()} at {call.site}",
    }


def _unlike(said: list[dict[str, Any]], call: Call) -> CollectiveMismatch:
    told = {item["rank"]: item["text"] for item in said}
    lines = [f"ranks of {call.group} wait for each other in different calls"]
    lines += [f"  rank {rank} | {text}" for rank, text in sorted(told.items())]
    lines.append(
        "  HINT: different numbers of batches? All ranks must make the same collectives, in order"
    )
    return CollectiveMismatch("\n".join(lines), told)

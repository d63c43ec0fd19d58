"""Whether a wait can still end, from what the other ranks have said in the world's store.

A rank that has waited for long says in which call; one whose function has returned says how many
calls it has made and messages it has sent. So ranks in different calls, and a rank that makes none
any more, are named long before the deadline. Asked in long waits only: a quick collective pays for
counting, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.comm import call as calls
from unisono.comm.call import Call, sent_to
from unisono.comm.health import watchdog
from unisono.comm.health.watchdog import Watchdog
from unisono.errors import CollectiveMismatch, UnisonoError, name_ranks

_COMPARED = ("op", "kind", "root")
_COMPARED_IF_KNOWN = ("device", "signature")
"""Facts of calls on tensors; None where a rank brings none."""
_ONE_DEVICE = "x.to(device) on all ranks: each kind of device has a backend of its own"
_EXPLAIN_S = 1.0
"""Longest time to wait for the words of ranks that raise the same error at the same time."""
_MOST_RANKS = 64
"""Larger groups do not ask every rank for its source line: that must cost the store little."""


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
        # A rank that fails of a mismatch posts that: all are to raise the mismatch itself. One that
        # returns early may do so because of a failure, which is then the better reason.
        unlike = _unlike_calls(call, dog) if call.number else None
        return unlike or dog.poll_failure() or _missed_by_returned(call, dog)
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
    record = _record(call, dog)
    for item in dog.news():
        if (item.get("group"), item.get("number")) == (call.key, call.number):
            return _mismatch([*item["calls"], record], call)
    key = f"waits/{call.key}"
    other = dog.find(key)
    if other is None or other["number"] < call.number:
        dog.put(key, record)
    elif other["number"] == call.number and _are_unlike(other, record):
        pair = [other, record]
        dog.publish({"group": call.key, "number": call.number, "calls": pair})
        return _mismatch(pair, call)
    return None


def _record(call: Call, dog: Watchdog) -> dict[str, Any]:
    """Return what other ranks need to know of a call of this one."""
    return {
        "rank": dog.rank,
        "number": call.number,
        "op": call.op,
        "kind": call.kind,
        "root": call.root,
        "text": f"{call.describe()} at {call.site}",
        "device": call.device,
        "signature": call.signature and list(call.signature),
    }


def _are_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return any(one[k] != other[k] for k in _COMPARED) or any(
        None not in (one[k], other[k]) and one[k] != other[k] for k in _COMPARED_IF_KNOWN
    )


def _mismatch(records: list[dict[str, Any]], call: Call) -> CollectiveMismatch:
    texts = {record["rank"]: record["text"] for record in records}
    lines = [f"ranks of {call.group} wait for each other in different calls"]
    lines += [f"  rank {rank} | {text}" for rank, text in sorted(texts.items())]
    hint = "different numbers of batches? All ranks must make the same collectives, in order"
    lines.append(_hint(records, hint))
    return CollectiveMismatch("\n".join(lines), texts)


def _hint(records: Sequence[Mapping[str, Any]], usual: str) -> str:
    devices = {record["device"] for record in records} - {None}
    return f"  HINT: {_ONE_DEVICE if len(devices) > 1 else usual}"


def explained(error: CollectiveMismatch, call: Call, ranks: Sequence[int]) -> CollectiveMismatch:
    """Return the error of a broken group with the call and the source line of every rank.

    All ranks raise it at the same time, so each tells the others what it has called.
    """
    dog = watchdog.of(call.key)
    is_full = not error.calls or call.describe() in str(error)  # a message, or told by a wait
    if dog is None or is_full or len(ranks) > _MOST_RANKS:
        return error
    records = dog.share(f"unlike/{call.key}", _record(call, dog), ranks, _EXPLAIN_S)
    made = {rank: f" | {record['text']}" for rank, record in records.items()}
    lines = [str(error).partition("\n")[0]]
    lines += [f"  rank {rank}: {text}{made.get(rank, '')}" for rank, text in error.calls.items()]
    hint = str(error).partition("HINT: ")[2]
    if not hint or "adds the source line" in hint:  # which is there already
        hint = "all ranks must make the same collectives in the same order"
    lines.append(_hint(list(records.values()), hint))
    return CollectiveMismatch("\n".join(lines), error.calls)


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

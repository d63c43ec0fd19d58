"""What a rank does when another failed or did not come: one error that says where each rank is."""

from __future__ import annotations

import contextlib
import enum
import re
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from unisono.comm.call import Call, thread_stacks
from unisono.comm.health import mark_as_news, watchdog
from unisono.errors import (
    RankFailed,
    RankTimeout,
    UnisonoError,
    compress_ranks,
    grouped_stacks,
    name_ranks,
    ranks_by_text,
)

_POSTED_WAIT_S = 1.0
_LOST = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_GLOO = re.compile(r"\[[^\]]*gloo[^\]]*\.(cc|h):\d+\]")
"""How gloo, which has no types for its errors, begins every one: with its own source line."""

_SILENT = {
    "dead": "its process has ended",
    "stopped": "its process is stopped, by a signal or a debugger",
    "alive": f"its process lives, but has not answered within {watchdog.ANSWER_S:g} s",
    "unknown": "has made no call of unisono yet, or has ended before its first",
}
"""Why a rank has not said where it is, by the condition of its process."""

Answers = dict[int, dict[str, Any]]
"""What ranks have said of themselves (`watchdog.describe_self`)."""
NEW_GROUP = "new_group"
"""Operation of the call that stands for making a group."""


def post_failure(error: BaseException) -> None:
    """Tell the other ranks of this world that this rank failed with `error`.

    Called by the launcher or the test bench. Ranks that wait in a collective then raise
    `RankFailed` with this rank's traceback. Does nothing in a world of one.
    """
    watchdog.ensure()
    for dog in watchdog.running():
        dog.post_failure(error)


def posted_failure(key: str = "") -> RankFailed | None:
    """Return the failure another rank has posted, if any; asks the store.

    None, without starting anything, where the world has ended or is being closed.

    Args:
        key: key of the group whose ranks are meant, where it has a store of its own.
    """
    dog = watchdog.of(key)
    with contextlib.suppress(RuntimeError):
        failure = dog.poll_failure() if dog is not None else None
        return None if failure is None else mark_as_news(failure)
    return None


class Meaning(enum.Enum):
    """What an error of torch's own backends says."""

    NOT_YET = "this wait is over, the transfer goes on"
    LATE = "a deadline passed"
    LOST = "another rank has gone"
    OTHER = "something else"


def meaning_of(error: BaseException) -> Meaning:
    """Return what an error of torch means; its words are all that gloo gives."""
    words = str(error)
    if "Operation timed out" in words:
        return Meaning.NOT_YET
    if isinstance(error, RuntimeError) and ("imed out" in words or "timeout" in words):
        return Meaning.LATE
    is_lost = isinstance(error, _LOST) or (isinstance(error, RuntimeError) and _GLOO.search(words))
    return Meaning.LOST if is_lost else Meaning.OTHER


def tells_of_another(error: BaseException) -> bool:
    """Whether `error` says no more than that another rank went away or did not come.

    Ours are marked where they are raised; of torch's, only types and words of its backends count.
    What the user's own code raises, `RankFailed` of a run of its own included, is an error of this
    rank.
    """
    if isinstance(error, UnisonoError):
        return getattr(error, "is_news", False)
    return isinstance(error, _LOST) or (
        isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None
    )


def connection_lost(call: Call, backend_words: str) -> RankFailed:
    """Return the error for a transfer that broke: a posted failure if there is one, else the words.

    A peer that raised posts its failure at about the time its connections close, so wait a moment.
    """
    give_up = time.monotonic() + _POSTED_WAIT_S
    while (failure := posted_failure(call.key)) is None and time.monotonic() < give_up:
        time.sleep(0.05)
    if failure is not None:
        return failure
    dog = watchdog.of(call.key)
    others = () if dog is None else (rank for rank in dog.ranks if rank != dog.rank)
    dead = next((rank for rank in others if dog and dog.condition(rank) == "dead"), None)
    gone = "another rank of the group has gone" if dead is None else f"rank {dead} has died"
    lost = RankFailed(
        f"{call.describe()} at {call.site} broke off: {gone}\n"
        f"  the backend says: {backend_words.strip()}\n"
        "  HINT: look at the output of the other ranks; the first to stop is the cause",
        rank=dead,
    )
    return mark_as_news(lost)


def timed_out(
    call: Call, ranks: tuple[int, ...], timeout_s: float, cause: BaseException | None = None
) -> RankTimeout:
    """Return the deadline error of `call`, with the stacks of the other ranks of its group.

    Args:
        call: the call that waited.
        ranks: world ranks of its group.
        timeout_s: the deadline that passed.
        cause: what the transport raised, which may know who is missing.
    """
    if isinstance(cause, RankTimeout) and cause.stacks:
        return cause
    dog = watchdog.serving(call.key)
    answers: Answers = {}
    if dog is not None:
        with contextlib.suppress(RuntimeError):
            answers = {r: answer for r, answer in dog.ask_stacks().items() if r in ranks}
    others = [r for r in ranks if dog is None or r != dog.rank]
    missing = _missing(call, ranks, others, answers, cause)
    states: dict[int, str] = {}
    last: dict[int, str] = {}
    for rank in others:
        answer = answers.get(rank)
        if answer is None:
            states[rank] = _SILENT["unknown" if dog is None else dog.condition(rank)]
        elif not answer["call"]:
            last[rank] = "none yet"
            states[rank] = f"alive, has made no call yet; it is at {answer['site']}"
        else:
            last[rank] = f"{answer['call']} ({'done' if answer['done'] else 'under way'})"
            states[rank] = f"latest collective {last[rank]}"
    stacks = {rank: answer["stacks"] for rank, answer in answers.items()}
    shown = dict(stacks)
    if dog is not None:
        states[dog.rank] = f"latest collective {call.describe()} (under way)"
        shown[dog.rank] = thread_stacks()
    states = {rank: states[rank] for rank in sorted(states, key=lambda r: (r not in missing, r))}
    lines = [
        _headline(call, ranks, missing, answers, timeout_s, cause),
        *(f"  {name_ranks(r)}: {state}" for state, r in ranks_by_text(states).items()),
        *([grouped_stacks(shown, missing)] if stacks else []),
        f"HINT: {_hint(call, ranks, others, answers)}",
    ]
    late = RankTimeout(
        "\n".join(lines),
        stacks=stacks,
        missing=missing,
        op=call.op,
        site=call.site,
        last_collective=last,
    )
    return mark_as_news(late)


def _headline(
    call: Call,
    ranks: Sequence[int],
    missing: Sequence[int],
    answers: Answers,
    timeout_s: float,
    cause: BaseException | None,
) -> str:
    """Say who is late, for what, and who waits for them."""
    absence = f"{_absence(call, missing)}: " if missing else ""
    reason = "" if cause is None else str(cause).partition("\n")[0]
    if isinstance(cause, RankTimeout) and "timed out after" not in reason:
        return f"{absence}{call.describe()} at {call.site} was given up\n  {reason}"
    deadline = f"{absence}{call.describe()} timed out after {timeout_s:g} s at {call.site}"
    elsewhere = [r for r in answers if answers[r]["done"] or answers[r]["group"] != call.key]
    waiting = [r for r in ranks if r not in missing and r not in elsewhere]
    if not missing or not waiting:
        return deadline
    verb, whom = "waits" if len(waiting) == 1 else "wait", "it" if len(missing) == 1 else "them"
    return f"{deadline}; {name_ranks(waiting)} {verb} for {whom}"


def _missing(
    call: Call,
    ranks: Sequence[int],
    others: Sequence[int],
    answers: Answers,
    cause: BaseException | None,
) -> list[int]:
    """Return the world ranks that `call` waited for: whom the transport names, else who is late."""
    if isinstance(cause, RankTimeout) and cause.missing:
        return list(cause.missing)
    if peers := {*call.sends_to, *call.receives_from}:
        return sorted(ranks[peer] for peer in peers)
    silent = [rank for rank in others if rank not in answers]
    if call.number == 0:  # a group that is being made
        return sorted([*silent, *(r for r, a in answers.items() if a["group"] != call.key)])
    behind = [r for r, a in answers.items() if a["begun"].get(call.key, 0) < call.number]
    return sorted([*silent, *behind])


def _absence(call: Call, missing: Sequence[int]) -> str:
    """Say in words what missing ranks have not done."""
    late, has = name_ranks(missing), "has" if len(missing) == 1 else "have"
    if call.receives_from and not call.sends_to:
        return f"no message came from {late}"
    if call.sends_to and not call.receives_from:
        return f"{late} {has} not taken the message"
    return f"{late} {has} not arrived"


def _hint(call: Call, ranks: Sequence[int], others: Sequence[int], answers: Answers) -> str:
    """Return the advice that fits best what the other ranks are doing."""
    busy = {rank: answer for rank, answer in answers.items() if not answer["done"]}
    if call.op == NEW_GROUP:
        is_rival = any(a["op"] == NEW_GROUP and a["group"] != call.key for a in busy.values())
        return (
            f"{'ranks are making different groups: ' if is_rival else ''}all members of a new "
            "group call sub() or split(), with the same ranks in the same order; several groups "
            "in the same order on all ranks"
        )
    here = next((place for place, rank in enumerate(ranks) if rank not in others), -1)
    for place in set(call.receives_from) - set(call.sends_to):
        answer = busy.get(ranks[place])
        if answer is None or answer["group"] != call.key:
            continue
        if here in answer["receives_from"] and here not in answer["sends_to"]:
            return (
                f"this rank and {name_ranks([ranks[place]])} wait for a message of each other: "
                "let one send first, or both call comm.exchange(sends, recvs)"
            )
    return (
        "UNISONO_CHECK=1 names the first call in which ranks disagree; "
        "comm.with_timeout(seconds), UNISONO_TIMEOUT_S or the timeout of init_process_group sets "
        "the deadline"
    )


# -- how waits of our transports end: `doing` is the call, `me` the rank that waits ---------------


def not_arrived(doing: str, me: int, absent: Sequence[int], timeout_s: float) -> RankTimeout:
    """Return the error for a deadline that passed; no rank is named where none is known."""
    arrival = f"rank {compress_ranks(absent)}" if absent else "not known"
    return RankTimeout(
        f"{doing} on rank {me} timed out after {timeout_s:g} s\n"
        f"  not arrived: {arrival}\n"
        "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree; "
        "UNISONO_TIMEOUT_S sets the deadline",
        missing=absent,
        op=doing,
    )


def text_of(error: BaseException) -> str:
    """Return an error as text for other ranks; one of ours needs no stack."""
    if isinstance(error, UnisonoError):
        return "".join(traceback.format_exception_only(error)).strip()
    return "".join(traceback.format_exception(error)).strip()


def peer_died(doing: str, me: int, rank: int, pid: int, host: str) -> RankFailed:
    """Return the error for a peer whose process has ended."""
    return RankFailed(
        f"rank {rank} (process {pid} on {host}) died while rank {me} waited for it in {doing}\n"
        f"  HINT: look at the last output of rank {rank}; "
        "a process killed for lack of memory leaves none",
        rank=rank,
        host=host,
    )


def peer_failed(doing: str, me: int, teller: int, culprit: int, host: str, text: str) -> RankFailed:
    """Return the error for a failure that rank `teller` has told of."""
    via = "" if culprit == teller else f", as rank {teller} has seen,"
    return RankFailed(
        f"rank {culprit} failed{via} while rank {me} waited in {doing}\n{text}",
        rank=culprit,
        host=host,
        traceback=text,
    )


def peer_gave_up(
    doing: str, me: int, teller: int, culprit: int, host: str, text: str
) -> RankFailed | RankTimeout:
    """Return the error for a peer whose own deadline has passed: it will not come any more.

    `doing` is empty where this rank has made no call.
    """
    if culprit == me:
        during = f" during {doing}" if doing else ""
        return RankTimeout(
            f"rank {me} is late: rank {teller} waited for this rank and has given up{during}\n"
            f"{text}",
            missing=[teller],
            op=doing or None,
        )
    during = f", while rank {me} waited in {doing}" if doing else ""
    return RankFailed(
        f"rank {teller} has given up waiting for rank {culprit}{during}\n{text}",
        rank=culprit,
        host=host,
        traceback=text,
    )


def peer_left(doing: str, me: int, gone: Sequence[int]) -> RankFailed:
    """Return the error for peers that have left the group."""
    return RankFailed(
        f"rank {compress_ranks(gone)} has closed the group, "
        f"but rank {me} waits for it in {doing}\n"
        "  HINT: let all ranks make the same calls before they close the group",
        rank=gone[0],
    )

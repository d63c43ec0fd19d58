"""What a rank does when another failed or did not come: one error with everybody's whereabouts."""

from __future__ import annotations

import time

import torch.distributed as dist

from unisono.comm import watchdog
from unisono.comm.call import Call
from unisono.errors import RankFailed, RankTimeout, compress_ranks

_POSTED_WAIT_S = 1.0


def post_failure(error: BaseException) -> None:
    """Tell the other ranks of this world that this rank failed with `error`.

    Called by whoever runs the rank's function (the launcher, the test bench). Ranks that wait in a
    collective then raise `RankFailed` with this rank's traceback. Does nothing in a world of one.
    """
    dog = watchdog.ensure()
    if dog is not None:
        dog.post_failure(error)


def posted_failure() -> RankFailed | None:
    """Return the failure another rank has posted, if any; asks the store."""
    if not dist.is_initialized():
        return None
    dog = watchdog.ensure()
    try:
        return dog.poll_failure() if dog is not None else None
    except RuntimeError:
        return None


def connection_lost(call: Call, backend_words: str) -> RankFailed:
    """Return the error for a transfer that broke: a posted failure if there is one, else the words.

    A peer that raised posts its failure at about the time its connections close, so wait a moment.
    """
    give_up = time.monotonic() + _POSTED_WAIT_S
    while True:
        failure = posted_failure()
        if failure is not None:
            return failure
        if time.monotonic() > give_up:
            break
        time.sleep(0.05)
    return RankFailed(
        f"{call.describe()} at {call.site} broke off: another rank of the group has gone\n"
        f"  the backend says: {backend_words.strip()}\n"
        "  HINT: look at the output of the other ranks; the first to stop is the cause"
    )


def timed_out(call: Call, ranks: tuple[int, ...], timeout_s: float) -> RankTimeout:
    """Return the deadline error of `call`, with the stacks of the other ranks of its group.

    Args:
        call: the call that waited.
        ranks: world ranks of its group.
        timeout_s: the deadline that passed.
    """
    dog = watchdog.ensure()
    answers = {}
    if dog is not None:
        try:
            answers = {r: a for r, a in dog.ask_stacks().items() if r in ranks}
        except RuntimeError:
            answers = {}
    others = [r for r in ranks if dog is None or r != dog.rank]
    missing = [
        rank
        for rank in others
        if rank not in answers
        or answers[rank]["group"] != call.key
        or answers[rank]["seq"] < call.seq
    ]
    lines = [f"{call.describe()} timed out after {timeout_s:g} s at {call.site}"]
    if missing:
        lines.append(f"  not arrived: rank {compress_ranks(missing)}")
    last: dict[int, str] = {}
    for rank in others:
        if rank not in answers:
            lines.append(f"  rank {rank}: no answer (dead, stopped, or without unisono.comm)")
            continue
        answer = answers[rank]
        state = "done" if answer["done"] else "under way"
        last[rank] = f"{answer['call']} ({state})" if answer["call"] else "none yet"
        lines.append(f"  rank {rank}: latest collective {last[rank]}")
    for rank in [*missing, *(r for r in others if r not in missing)]:
        if rank in answers:
            lines.append(f"--- stacks of rank {rank}\n{answers[rank]['stacks']}")
    lines.append(
        "  HINT: UNISONO_CHECK=1 names the first call in which ranks disagree; "
        "comm.with_timeout(seconds) or UNISONO_TIMEOUT_S sets the deadline"
    )
    return RankTimeout(
        "\n".join(lines),
        stacks={r: a["stacks"] for r, a in answers.items()},
        missing=missing,
        op=call.op,
        site=call.site,
        last_collective=last,
    )

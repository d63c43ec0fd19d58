"""Which rank is the cause of a failure, and the one error that the caller gets."""

from __future__ import annotations

import copy
import os
import re
import signal
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.errors import (
    SAVED_ALONE,
    RankFailed,
    RankTimeout,
    RemoteError,
    grouped_stacks,
    name_ranks,
    ranks_by_text,
)
from unisono.launch.logs import tail
from unisono.launch.pool.payload import load_exception
from unisono.launch.pool.protocol import Failed, RankState
from unisono.launch.pool.stacks import (
    crash_in,
    folded_threads,
    outside_collectives,
    user_line,
    user_threads,
)

STARTER_LOG = "starter.log"
"""Output of the program that started the ranks, in the directory of the run."""
LOG_LINES = 20
"""Lines of a rank's log that the error of a rank without traceback shows."""

_TWICE = "initialize the default process group twice"
_ONCE = "if not torch.distributed.is_initialized(): torch.distributed.init_process_group(...)"
_NEVER = "Default process group has not been initialized"
_ABSENT = re.compile(
    r"No module named '(heat|distdl|ddpw|pytagi|ocpmodels|fairchem)(?:\.[\w.]+)?'\s*$"
)
"""An import that `unisono run --compat` can serve."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended."""

    state: Literal["done", "requeued", "failed", "timeout", "cancelled", "lost"]
    """In one word; `lost`: the starter of the ranks ended, and some ranks did not report."""
    attempt: int
    """Which attempt."""
    was_ready: bool
    """Whether all ranks have been ready."""
    start_s: float
    """Seconds until the last rank was ready."""
    wall_s: float
    """Seconds from then to the last return."""
    exit_code: int | None = None
    """That of the program which started the ranks."""
    deadline: str = ""
    """Which deadline passed."""


def is_own(state: RankState) -> bool:
    """Whether a rank failed or died by itself, not because of another or an interrupt."""
    return state.is_bad and not (state.failed is not None and state.failed.is_consequence)


def judge(states: Sequence[RankState], ending: Ending, job_dir: Path) -> RankFailed | RankTimeout:
    """Return the error of an attempt that did not succeed."""
    if ending.state == "failed":
        return failure(states, job_dir, ending.attempt)
    if ending.state == "timeout":
        return timeout(states, ending, job_dir)
    return lost(states, ending, job_dir)


def headline(states: Sequence[RankState], ending: Ending) -> str:
    """Return the first line of the error of an attempt; nothing is unpickled for it."""
    if ending.state == "failed":
        return _headline(choose_cause(states), len(states))
    late = name_ranks(_late_ranks(states, ending))
    if ending.state == "timeout":
        awaited, waiting = _awaited(states, ending)
        if not waiting:
            return f"{late} of {len(states)} {ending.deadline}"
        whom = "them" if len(awaited) > 1 else "it"
        return (
            f"{name_ranks(awaited)} of {len(states)} {ending.deadline}; "
            f"{name_ranks(waiting)} waited for {whom}"
        )
    code = "" if ending.exit_code is None else f" (code {ending.exit_code})"
    return f"{late} of {len(states)} ended without a word{code}"


def _late_ranks(states: Sequence[RankState], ending: Ending) -> list[int]:
    """Return the ranks that were late."""
    late = [state.rank for state in states if not state.is_good]
    if ending.state == "timeout" and not ending.was_ready:
        return [state.rank for state in states if not state.is_ready] or late
    return late


def _awaited(states: Sequence[RankState], ending: Ending) -> tuple[list[int], list[int]]:
    """Return the ranks that others waited for, and those that were late only because they waited.

    The former are the one whose number of collectives is behind, else those outside of all.
    """
    late = _late_ranks(states, ending)
    standings = {s.rank: s.standing for s in states if s.rank in late and s.standing is not None}
    stacks = {state.rank: user_threads(state.stack) for state in states if state.rank in late}
    outside = outside_collectives(stacks)
    awaited = outside if 0 < len(outside) < len(late) else late
    if len({standing.group for standing in standings.values()}) == 1:
        least = min(standing.number for standing in standings.values())
        behind = [rank for rank, standing in standings.items() if standing.number == least]
        if len(behind) == 1 < len(standings):
            awaited = behind
    return awaited, [rank for rank in late if rank not in awaited and rank not in outside]


def choose_cause(states: Sequence[RankState]) -> RankState:
    """Return the rank that is the cause, which need not be the first to fail.

    A rank that died without a report comes before one that reported an error of its own, and that
    before those that only noticed the end of another. Among equals the earliest counts, or the
    lowest of those that raised the same error.
    """

    def precedence(state: RankState) -> tuple[int, float, int]:
        if state.failed is None:
            return 0, 0.0, state.rank
        return (2 if state.failed.is_consequence else 1), state.at.get("failed", 0.0), state.rank

    return _alike(min((state for state in states if state.is_bad), key=precedence), states)[0]


def _alike(cause: RankState, states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that raised the same error as `cause`, including it."""

    def is_alike(failed: Failed | None) -> bool:
        if failed is None or cause.failed is None:
            return False
        return not failed.is_consequence and failed.summary == cause.failed.summary

    return [state for state in states if state is cause or is_alike(state.failed)]


def failure(
    states: Sequence[RankState], job_dir: Path | None = None, attempt: int = 0
) -> RankFailed | RankTimeout:
    """Build the error for a world in which at least one rank failed or died."""
    cause = choose_cause(states)
    failed, alike = cause.failed, _alike(cause, states)
    original = load_exception(failed.pickled) if failed else None
    if isinstance(original, RankTimeout):
        return _late(cause, states, original, job_dir)
    crash = log_tail = ""
    if job_dir is not None:
        crash = crash_in(job_dir / f"rank-{cause.rank}.stack")
        lines = tail(job_dir / f"rank-{cause.rank}.log").splitlines()
        log_tail = "\n".join(lines[-LOG_LINES:])
    others = [state for state in states if state not in alike]
    consequences, waiting = _fates(others)
    lines = [_headline(cause, len(states))]
    if failed is None:
        lines += [f"It stood at:\n{textwrap.indent(crash, '  ')}"] if crash else []
        if log_tail:
            lines.append(f"Last lines of its output:\n{textwrap.indent(log_tail, '  ')}")
    elif original is not None:
        lines.append(failed.traceback.rstrip())
    if len(alike) > 1:
        same = name_ranks([state.rank for state in alike if state is not cause])
        lines.append(f"The same happened on {same}")
    is_mismatch = failed is not None and failed.is_mismatch
    calls = _different_calls(states, original) if is_mismatch else []
    lines += calls + _others(others, consequences, waiting)
    # Where ranks differ in a call that all of them make, the error says itself what to do.
    hint = _hint(cause, log_tail) if calls or not is_mismatch else ""
    lines += _closing(_saved_alone(states) or hint, job_dir)
    killed = failed is None and cause.exit_code is not None and cause.exit_code < 0
    error = RankFailed(
        "\n".join(lines),
        rank=cause.rank,
        host=cause.place,
        exit_code=None if killed else (failed or cause).exit_code,
        signal=signal_name(-(cause.exit_code or 0)) if killed else None,
        traceback=failed.traceback if failed else crash or None,
        exception=original,
        consequences=consequences,
        waiting=waiting,
        log_tail=log_tail,
        job_dir=None if job_dir is None else str(job_dir),
        attempt=attempt,
    )
    if failed is not None:
        error.__cause__ = original or RemoteError(failed.traceback)
    return error


def _late(
    cause: RankState, states: Sequence[RankState], original: RankTimeout, job_dir: Path | None
) -> RankTimeout:
    """Return a deadline that passed in a collective: it names the late ranks and has all stacks."""
    site = f" at {cause.failed.site}" if cause.failed and cause.failed.site else ""
    logs = f"; logs are in {job_dir}" if job_dir else ""
    who = f"Raised by rank {cause.rank} of {len(states)} on {cause.place}{site}{logs}"
    error = copy.copy(original)
    error.args = ("\n".join([str(original), who, *_closing(_saved_alone(states), None)]),)
    if cause.failed and not original.stacks:
        error.__cause__ = RemoteError(cause.failed.traceback)
    return error


def _saved_alone(states: Sequence[RankState]) -> str:
    is_saving = any(state.failed and SAVED_ALONE in state.failed.traceback for state in states)
    return SAVED_ALONE if is_saving else ""


def _fates(others: Sequence[RankState]) -> tuple[dict[int, str], dict[int, str]]:
    """Return what ranks that are not the cause have said, and where they stood."""
    said: dict[int, str] = {}
    places: dict[int, str] = {}
    for state in others:
        failed = state.failed
        if state.is_bad or failed:
            said[state.rank] = failed.summary if failed else how_ended(state.exit_code)
        if state.stack:
            places[state.rank] = user_line(state.stack)
        elif failed and failed.is_consequence and failed.site:
            places[state.rank] = failed.site
    return said, places


def timeout(
    states: Sequence[RankState], ending: Ending, job_dir: Path | None = None
) -> RankTimeout:
    """Build the error for a deadline that passed while no rank failed."""
    stacks = {state.rank: user_threads(state.stack) for state in states if state.stack}
    awaited, _ = _awaited(states, ending)
    to_blame = awaited[0] if len(awaited) == 1 else None
    calls = {state.rank: state.standing.call for state in states if state.standing is not None}
    lines = [headline(states, ending)]
    for call, ranks in ranks_by_text(calls).items():
        lines.append(f"Latest collective of {name_ranks(ranks)}: {call}")
    if silent := [state.rank for state in states if state.rank not in stacks]:
        lines.append(f"No stack from {name_ranks(silent)}.")
    if stacks:
        places = {state.rank: folded_threads(state.stack) for state in states if state.stack}
        lines.append(grouped_stacks(places, awaited))
    lines += _closing("a longer timeout_s (--timeout-s) if this is only slow", job_dir)
    return RankTimeout("\n".join(lines), stacks=stacks, rank=to_blame, last_collective=calls)


def lost(states: Sequence[RankState], ending: Ending, job_dir: Path) -> RankFailed:
    """Build the error for ranks that ended without a report, with the output of their starter."""
    late = [state for state in states if state.rank in _late_ranks(states, ending)]
    output = tail(job_dir / STARTER_LOG).splitlines()[-LOG_LINES:]
    lines = [headline(states, ending), *(f"  {line}" for line in output)]
    lines += _closing("the host may have gone down", job_dir)
    return RankFailed(
        "\n".join(lines),
        rank=late[0].rank if late else None,
        host=late[0].place if late else None,
        exit_code=ending.exit_code,
        job_dir=str(job_dir),
        attempt=ending.attempt,
    )


def _headline(state: RankState, size: int) -> str:
    who = f"rank {state.rank} of {size} on {state.place}"
    if state.failed is None:
        return f"{who} {how_ended(state.exit_code)}"
    if state.failed.lost:
        return f"{who} {state.failed.summary}"
    if state.failed.exit_code is not None:
        return f"{who} exited before returning, with code {state.failed.exit_code}"
    return f"{who} raised {state.failed.summary}"


def how_ended(exit_code: int | None, *, has_returned: bool = False) -> str:
    """Describe how the process of a rank ended, whose function may have returned."""
    if exit_code is None:
        return "was stopped"
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"exited with code {exit_code}{'' if has_returned else ' before returning'}"


def signal_name(number: int) -> str:
    """Name a signal, by its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _others(
    others: Sequence[RankState], consequences: Mapping[int, str], waiting: Mapping[int, str]
) -> list[str]:
    """Describe the ranks that are not the cause, and where they were stopped."""
    if not others:
        return []
    fates = {rank: said.splitlines()[0] for rank, said in consequences.items()}
    fates |= {rank: f"at {place}" for rank, place in waiting.items()}
    stopped = name_ranks([state.rank for state in others])
    by_fate = ranks_by_text(dict(sorted(fates.items()))).items()
    words = "; ".join(f"{name_ranks(ranks)}: {fate}" for fate, ranks in by_fate)
    words = words.removeprefix(f"{stopped}: ")  # all share one
    return [f"Stopped as a consequence: {stopped}" + (f" ({words})" if words else "")]


def _different_calls(states: Sequence[RankState], error: BaseException | None) -> list[str]:
    """Name the line of every rank: only the user can tell which is wrong.

    Nothing if the ranks that disagree are at the same line.
    """
    sites = {state.rank: user_line(state.stack) if state.stack else "" for state in states}
    sites |= {s.rank: s.failed.site for s in states if s.failed and s.failed.site}
    disagree = {state.rank for state in states if state.failed and state.failed.is_mismatch}
    disagree |= sites.keys() & getattr(error, "calls", {})
    if len({sites[rank] for rank in disagree}) == 1 < len(disagree):
        return []
    by_site = ranks_by_text(sites)
    if silent := by_site.pop("", []):
        by_site["in no call of the group any more"] = silent
    lines = [f"  {name_ranks(ranks)}: {site}" for site, ranks in by_site.items()]
    return ["The ranks do not make the same calls:", *lines] if len(lines) > 1 else []


def _hint(cause: RankState, log_tail: str) -> str:
    if (failed := cause.failed) is not None:
        if failed.is_mismatch:
            return (
                "different numbers of batches? drop_last=True, a DistributedSampler, or "
                "model.join(); UNISONO_CHECK=1 compares every call"
            )
        if failed.lost:
            return failed.lost
        if _TWICE in failed.traceback:
            return f"the ranks have joined their world already: {_ONCE}"
        if _NEVER in failed.traceback:
            return "unisono.world() first, or torch.distributed.init_process_group()"
        if absent := _ABSENT.search(failed.traceback):
            return f"unisono run --compat {absent[1]} ... lets unisono answer that import"
        return 'on="inline" (--on inline) runs the function in this process, under your debugger'
    name = signal_name(-cause.exit_code) if cause.exit_code and cause.exit_code < 0 else ""
    if name == "SIGKILL":
        peak = "" if cause.peak_mb is None else f"; this rank's peak was {cause.peak_mb:,.0f} MB"
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
        return f"often the kernel, out of memory: this host has {total:,.0f} MB{peak}"
    if name == "SIGABRT" and "collective mismatch" in log_tail:
        return "ranks made unlike calls; init_process_group('shm') names them and their lines"
    if name == "SIGBUS":
        free = "no /dev/shm here"
        with suppress(OSError):
            space = os.statvfs("/dev/shm")
            free = f"{space.f_bavail * space.f_frsize / 2**20:,.0f} MB free there"
        return f"often a full /dev/shm: {free}; or a native library"
    if name == "SIGSEGV":
        return "a native library crashed; the stack above says who called it"
    return "something in the function ends the process (os._exit?)"


def _closing(hint: str, job_dir: Path | None) -> list[str]:
    """Return the last line of a message, if there is anything to say."""
    words = "; ".join(filter(None, (hint, f"logs are in {job_dir}" if job_dir else "")))
    return [f"HINT: {words}"] if words else []

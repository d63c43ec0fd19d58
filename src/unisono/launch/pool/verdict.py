"""Which rank is to blame, and the one error the caller gets: facts in, exception out."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.errors import RankFailed, RankTimeout, RemoteError, name_ranks
from unisono.launch.logs import tail
from unisono.launch.pool.payload import load_exception
from unisono.launch.pool.protocol import Failed, Standing
from unisono.launch.pool.stacks import crash_in, grouped, outside_collectives, user_line

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
class Fate:
    """What is known of one rank at the moment of judgement."""

    rank: int
    """Its place in the world."""
    host: str
    """Where it ran."""
    failed: Failed | None = None
    """Its own report, if it made one."""
    failed_at: float = 0.0
    """When that report came."""
    exit_code: int | None = None
    """How it ended, as `subprocess` says it: negative is a signal. None: it was still running."""
    peak_mb: float | None = None
    """Largest memory it used, once it ended."""
    log_tail: str = ""
    """End of what it printed."""
    crash: str = ""
    """Its Python stacks when a signal ended it, where the interpreter could write them."""

    @property
    def is_bad(self) -> bool:
        """Whether it failed or died."""
        return self.failed is not None or self.exit_code is not None

    @property
    def is_own(self) -> bool:
        """Whether it failed or died of itself, and not because of another rank or an interrupt."""
        return self.is_bad and not (self.failed is not None and self.failed.is_consequence)


def with_last_words(fate: Fate, job_dir: Path) -> Fate:
    """Return a fate with what its rank has left in the directory of the run."""
    lines = tail(job_dir / f"rank-{fate.rank}.log").splitlines()[-LOG_LINES:]
    crash = crash_in(job_dir / f"rank-{fate.rank}.stack")
    return replace(fate, log_tail="\n".join(lines), crash=crash)


def choose_cause(fates: Sequence[Fate]) -> Fate:
    """Return the rank that failed first in meaning, not in time.

    A rank that died without a word comes before one that reported an error of its own, and that
    before those that only noticed that another one had gone. Among equals the earliest counts.
    """

    def precedence(fate: Fate) -> tuple[int, float, int]:
        if fate.failed is None:
            return 0, 0.0, fate.rank
        return (2 if fate.failed.is_consequence else 1), fate.failed_at, fate.rank

    return min((fate for fate in fates if fate.is_bad), key=precedence)


def failure(
    fates: Sequence[Fate],
    *,
    stacks: Mapping[int, str],
    job_dir: str | None = None,
    attempt: int = 0,
) -> RankFailed | RankTimeout:
    """Build the error for a world in which at least one rank failed or died."""
    cause = choose_cause(fates)
    size = len(fates)
    original = load_exception(cause.failed.pickled) if cause.failed else None
    consequences = {
        fate.rank: fate.failed.summary if fate.failed else ending(fate.exit_code)
        for fate in fates
        if fate is not cause and fate.is_bad
    }
    waiting = {
        fate.rank: fate.failed.site
        for fate in fates
        if fate is not cause and fate.failed and fate.failed.is_consequence and fate.failed.site
    }
    waiting |= {rank: user_line(text) for rank, text in stacks.items() if rank != cause.rank}
    lines = [_headline(cause, size)]
    if cause.failed is None:
        if cause.crash:
            lines.append(f"It stood at:\n{_indent(cause.crash)}")
        if cause.log_tail:
            lines.append(f"Last lines of its output:\n{_indent(cause.log_tail)}")
    elif original is not None:
        lines.append(cause.failed.traceback.rstrip())
    lines += _different_calls(fates, stacks) if _is_mismatch(cause) else []
    lines += _others(fates, cause, consequences, waiting)
    lines.append(f"HINT: {_hint(cause, job_dir)}")
    message = "\n".join(lines)
    if isinstance(original, RankTimeout):
        error: RankFailed | RankTimeout = RankTimeout(
            message,
            stacks=original.stacks,
            missing=original.missing,
            op=original.op,
            site=original.site,
            rank=original.rank,
            last_collective=original.last_collective,
        )
    else:
        killed = cause.failed is None and cause.exit_code is not None and cause.exit_code < 0
        error = RankFailed(
            message,
            rank=cause.rank,
            host=cause.host,
            exit_code=None if killed else (cause.failed or cause).exit_code,
            signal=signal_name(-(cause.exit_code or 0)) if killed else None,
            traceback=cause.failed.traceback if cause.failed else cause.crash or None,
            exception=original,
            consequences=consequences,
            waiting=waiting,
            log_tail=cause.log_tail,
            job_dir=job_dir,
            attempt=attempt,
        )
    if cause.failed is not None:
        error.__cause__ = original or RemoteError(cause.failed.traceback)
    return error


def suspect(
    late: Sequence[int], standings: Mapping[int, Standing], stacks: Mapping[int, str]
) -> int | None:
    """Return the one rank that keeps the others waiting, if one can be named.

    That is the one whose number of collectives is behind, else the one outside of all.
    """
    told = {rank: standings[rank] for rank in late if rank in standings}
    if len({standing.group for standing in told.values()}) == 1:
        least = min(standing.number for standing in told.values())
        behind = [rank for rank, standing in told.items() if standing.number == least]
        if len(behind) == 1 < len(told):
            return behind[0]
    candidates = outside_collectives({rank: stacks.get(rank, "") for rank in late}) or late
    return candidates[0] if len(candidates) == 1 else None


def timeout(
    fates: Sequence[Fate],
    *,
    what: str,
    stacks: Mapping[int, str],
    suspect: int | None = None,
    last_collective: Mapping[int, str] | None = None,
    job_dir: str | None = None,
) -> RankTimeout:
    """Build the error for a deadline that passed while no rank failed."""
    silent = [fate.rank for fate in fates if fate.rank not in stacks]
    lines = [what]
    by_call: dict[str, list[int]] = {}
    for rank, call in sorted((last_collective or {}).items()):
        by_call.setdefault(call, []).append(rank)
    lines += [f"Latest collective of {name_ranks(ranks)}: {c}" for c, ranks in by_call.items()]
    if silent:
        lines.append(f"No stack from {name_ranks(silent)}.")
    if stacks:
        lines.append(grouped(stacks, suspect))
    lines.append(f"HINT: a longer timeout_s if this is only slow{_logs_at(job_dir)}")
    return RankTimeout(
        "\n".join(lines), stacks=stacks, rank=suspect, last_collective=last_collective
    )


def _headline(fate: Fate, size: int) -> str:
    who = f"rank {fate.rank} of {size} on {fate.host}"
    if fate.failed is None:
        return f"{who} {ending(fate.exit_code)}"
    if fate.failed.lost:
        return f"{who} {fate.failed.summary}"
    if fate.failed.exit_code is not None:
        return f"{who} exited before returning, with code {fate.failed.exit_code}"
    return f"{who} raised {fate.failed.summary}"


def ending(exit_code: int | None) -> str:
    """Say how a process ended."""
    if exit_code is None:
        return "was stopped"
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"exited with code {exit_code} before returning"


def signal_name(number: int) -> str:
    """Name a signal, by its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _others(
    fates: Sequence[Fate],
    cause: Fate,
    consequences: Mapping[int, str],
    waiting: Mapping[int, str],
) -> list[str]:
    """Say what became of the ranks that are not to blame, and where they stood."""
    stopped = [fate.rank for fate in fates if fate is not cause]
    if not stopped:
        return []
    by_place: dict[str, list[int]] = {}
    for rank in stopped:
        if rank in waiting:
            by_place.setdefault(f"at {waiting[rank]}", []).append(rank)
        elif rank in consequences:
            by_place.setdefault(consequences[rank].splitlines()[0], []).append(rank)
    if len(by_place) == 1 and next(iter(by_place.values())) == stopped:
        told = next(iter(by_place))
    else:
        told = "; ".join(f"{name_ranks(ranks)}: {place}" for place, ranks in by_place.items())
    return [f"Stopped as a consequence: {name_ranks(stopped)}" + (f" ({told})" if told else "")]


def _is_mismatch(fate: Fate) -> bool:
    return fate.failed is not None and fate.failed.is_mismatch


def _different_calls(fates: Sequence[Fate], stacks: Mapping[int, str]) -> list[str]:
    """Name the line of every rank: which of them is wrong, only the user can tell."""
    places = {fate.rank: fate.failed.site for fate in fates if fate.failed and fate.failed.site}
    places |= {rank: user_line(text) for rank, text in stacks.items()}
    by_place: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        by_place.setdefault(place, []).append(rank)
    if not by_place:
        return []
    told = [f"  {name_ranks(ranks)}: {place}" for place, ranks in by_place.items()]
    silent = [fate.rank for fate in fates if fate.rank not in places]
    told += [f"  {name_ranks(silent)}: in no call of the group any more"] if silent else []
    return ["The ranks do not make the same calls:", *told]


def _hint(fate: Fate, job_dir: str | None) -> str:
    at = _logs_at(job_dir)
    if _is_mismatch(fate):
        return (
            "different numbers of batches? drop_last=True, a DistributedSampler, or model.join(); "
            f"UNISONO_CHECK=1 compares every call{at}"
        )
    if fate.failed is not None and fate.failed.lost:
        return f"{fate.failed.lost}{at}"
    if fate.failed is not None and _TWICE in fate.failed.traceback:
        return f"the ranks have joined their world already: {_ONCE}{at}"
    if fate.failed is not None and _NEVER in fate.failed.traceback:
        return f"unisono.world() first, or torch.distributed.init_process_group(){at}"
    if fate.failed is not None and (absent := _ABSENT.search(fate.failed.traceback)):
        return f"unisono run --compat {absent[1]} ... lets unisono answer that import{at}"
    if fate.failed is not None:
        return f'on="inline" runs the function in this process, under your debugger{at}'
    name = signal_name(-fate.exit_code) if fate.exit_code and fate.exit_code < 0 else ""
    if name == "SIGKILL":
        peak = "" if fate.peak_mb is None else f"; this rank's peak was {fate.peak_mb:,.0f} MB"
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
        return f"often the kernel, out of memory: this host has {total:,.0f} MB{peak}{at}"
    if name == "SIGABRT" and "collective mismatch" in fate.log_tail:
        return f"ranks made unlike calls; UNISONO_CHECK=1 names them and their source lines{at}"
    if name == "SIGBUS":
        free = "no /dev/shm here"
        with suppress(OSError):
            space = os.statvfs("/dev/shm")
            free = f"{space.f_bavail * space.f_frsize / 2**20:,.0f} MB free there"
        return f"often a full /dev/shm: {free}; or a native library{at}"
    if name == "SIGSEGV":
        return f"a native library crashed; the stack above says who called it{at}"
    return f"something in the function ends the process (os._exit?){at}"


def _logs_at(job_dir: str | None) -> str:
    return f"; logs are in {job_dir}" if job_dir else ""


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())

"""From the files of a job to what its caller gets: results, or the one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.errors import RankFailed, RankTimeout, name_ranks
from unisono.launch import job_files, verdict
from unisono.launch.caution import warn
from unisono.launch.payload import Parcel
from unisono.launch.pool import remote
from unisono.launch.pool.monitor import tail
from unisono.launch.pool.protocol import Standing
from unisono.launch.pool.remote import GOOD, Ending, RankState
from unisono.launch.results import Results
from unisono.launch.stacks import crash_in, user_threads


def read_results(
    directory: Path, ranks: int, ending: Ending, *, platform: str, threads: int
) -> Results[Any]:
    """Return what all ranks of the successful attempt `ending` returned."""
    values: list[Any] = []
    states = remote.read_states(directory, ranks, ending.attempt)
    hosts = [state.node or state.host if state else "" for state in states]
    for rank in range(ranks):
        path = remote.result_path(directory, rank)
        job_files.check_ours(path)
        try:
            values.append(Parcel.in_file(path).load())
        except Exception as error:
            raise RankFailed(
                f"what rank {rank} of {ranks} returned cannot be unpickled here\n"
                f"{type(error).__name__}: {error}\n"
                "HINT: return numbers, lists, dicts, arrays or tensors",
                rank=rank,
                host=hosts[rank],
            ) from error
    warn_of_ends(states)
    return Results(
        values,
        hosts=hosts,
        platform=platform,
        wall_s=ending.wall_s,
        start_s=ending.start_s,
        restarts=ending.attempt,
        threads=threads,
        dir=directory,
        logs={rank: tail(directory / f"rank-{rank}.log") for rank in range(ranks)},
    )


def warn_of_ends(states: Sequence[RankState | None]) -> None:
    """Warn of ranks that returned, and then did not end as they should."""
    for state in states:
        if state is not None and (state.warning or state.exit_code):
            how = state.warning or verdict.ending(state.exit_code)
            warn(f"rank {state.rank} returned its result, then {how}")


def read_error(directory: Path, ranks: int, ending: Ending) -> RankFailed | RankTimeout:
    """Return the error of an attempt that did not succeed."""
    fates = read_fates(directory, ranks, ending.attempt)
    states = remote.read_states(directory, ranks, ending.attempt)
    stacks = {s.rank: user_threads(s.stack) for s in states if s is not None and s.stack}
    if ending.state == "failed":
        return verdict.failure(fates, stacks=stacks, job_dir=str(directory), attempt=ending.attempt)
    good = {state.rank for state in states if state is not None and state.state in GOOD}
    late = [rank for rank in range(ranks) if rank not in good]
    if ending.state == "timeout":
        standings = {s.rank: Standing(**s.standing) for s in states if s and s.standing}
        if not ending.was_ready:
            waiting = {s.rank for s in states if s is not None and "ready" in s.at}
            late = [rank for rank in late if rank not in waiting] or late
        return verdict.timeout(
            fates,
            what=f"{name_ranks(late)} of {ranks} {ending.deadline}",
            stacks=stacks,
            suspect=verdict.suspect(late, standings, stacks),
            last_collective={rank: standing.call for rank, standing in standings.items()},
            job_dir=str(directory),
        )
    return _lost(directory, ranks, ending, fates, late)


def own_failure(directory: Path, ranks: int, attempt: int) -> RankFailed | RankTimeout | None:
    """Return the error of an attempt that was interrupted, where a rank did more than end."""
    fates = read_fates(directory, ranks, attempt)
    if not any(fate.is_own for fate in fates):
        return None
    return verdict.failure(fates, stacks={}, job_dir=str(directory), attempt=attempt)


def _lost(
    directory: Path, ranks: int, ending: Ending, fates: list[verdict.Fate], late: list[int]
) -> RankFailed:
    """Return the error of a world that ended without a word of the ranks `late`."""
    output = tail(directory / "starter.log").splitlines()[-verdict.LOG_LINES :]
    code = "" if ending.exit_code is None else f" (code {ending.exit_code})"
    lines = [f"{name_ranks(late)} of {ranks} ended without a word{code}"]
    lines += [f"  {line}" for line in output]
    lines.append(f"HINT: the host may have gone down; logs are in {directory}")
    first = fates[late[0]] if late else None
    return RankFailed(
        "\n".join(lines),
        rank=first.rank if first else None,
        host=first.host if first else None,
        exit_code=ending.exit_code,
        job_dir=str(directory),
        attempt=ending.attempt,
    )


def headline(directory: Path, ranks: int, ending: Ending) -> str:
    """Return the first line of the error of an attempt, without unpickling anything."""
    if ending.state == "failed":
        fates = read_fates(directory, ranks, ending.attempt)
        plain = [
            replace(fate, failed=replace(fate.failed, pickled=None)) if fate.failed else fate
            for fate in fates
        ]
        return str(verdict.failure(plain, stacks={})).splitlines()[0]
    return str(read_error(directory, ranks, ending)).splitlines()[0]


def read_fates(directory: Path, ranks: int, attempt: int) -> list[verdict.Fate]:
    """Return what is known of each rank of an attempt."""
    fates: list[verdict.Fate] = []
    for rank in range(ranks):
        state = remote.read_state(directory, rank, attempt)
        failed = remote.read_error(directory, rank, attempt)
        text = tail(directory / f"rank-{rank}.log")
        fates.append(
            verdict.Fate(
                rank=rank,
                host=(state.node or state.host) if state else "a host unknown",
                failed=failed,
                failed_at=state.at.get("failed", 0.0) if state else 0.0,
                exit_code=state.exit_code if state and state.state == "died" else None,
                peak_mb=state.peak_mb if state else None,
                crash=crash_in(directory / f"rank-{rank}.stack"),
                log_tail="\n".join(text.splitlines()[-verdict.LOG_LINES :]),
            )
        )
    return fates

"""Ranks that share nothing with their launcher but a directory: what they are told, what they left.

`Plan` is all that the starter of a world (a batch driver, the launcher of MPI ranks) and the agent
of each rank have to know, as plain data in `job.json`; neither unpickles anything of the user's.
The functions below it turn the files of an attempt into what its caller gets: values, or the one
error.
"""

from __future__ import annotations

import platform as python_platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import unisono
from unisono.errors import PlatformError, RankFailed, RankTimeout, name_ranks
from unisono.launch import job_files, verdict
from unisono.launch.caution import warn
from unisono.launch.payload import Parcel
from unisono.launch.platform import Platform
from unisono.launch.pool import remote as files
from unisono.launch.pool.monitor import Outcome, tail
from unisono.launch.pool.protocol import Standing
from unisono.launch.pool.remote import GOOD
from unisono.launch.stacks import crash_in, user_threads

if TYPE_CHECKING:
    from unisono.launch.pool.remote import Ending


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plain facts of a job."""

    run_id: str
    """Word that tells this run from all others."""
    ranks: int
    """Size of the world."""
    ranks_per_node: int
    """How many of them share a node."""
    nodes: int
    """Number of nodes."""
    cpus_per_rank: int
    """CPUs, and threads, of each rank."""
    env: dict[str, str]
    """Variables for the ranks."""
    start_timeout_s: float
    """Deadline of the start."""
    timeout_s: float | None
    """Deadline of the function."""
    grace_s: float
    """Time between asking a rank to stop and killing it."""
    interrupt_s: float
    """Time that ranks have to save and end after the first Ctrl-C."""
    max_restarts: int
    """Attempts after a failure."""
    max_requeues: int
    """Attempts that the function itself may ask for."""
    stop_signals: tuple[str, ...]
    """Signals that ask a rank to stop."""
    stack_signal: str
    """Signal at which a rank writes its stacks."""
    words: tuple[str, ...] = ()
    """More words for the program that starts the ranks."""
    versions: tuple[str, str] = ("", "")
    """Python and unisono of the submitter."""
    launcher: tuple[str, int, int] | None = None
    """Host, number and start of a process without which the ranks should not go on."""

    @classmethod
    def of(
        cls,
        platform: Platform,
        *,
        run_id: str,
        timeout_s: float | None,
        max_restarts: int,
        words: tuple[str, ...] = (),
        launcher: tuple[str, int, int] | None = None,
    ) -> Plan:
        """Return the plan of a checked platform."""
        same = ("ranks_per_node", "cpus_per_rank", "start_timeout_s", "grace_s", "interrupt_s")
        same = (*same, "max_requeues", "stack_signal")
        return cls(
            **{name: getattr(platform, name) for name in same},
            run_id=run_id,
            ranks=platform.world_size,
            nodes=platform.n_nodes,
            env=dict(platform.env or {}),
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            stop_signals=tuple(platform.stop_signals),
            words=words,
            versions=own_versions(),
            launcher=launcher,
        )

    @classmethod
    def read(cls, directory: Path) -> Plan:
        """Return the plan of the job in `directory`."""
        entry: dict[str, Any] = job_files.read_state(directory)["plan"]
        tuples = {name: tuple(entry[name]) for name in ("stop_signals", "words", "versions")}
        launcher = entry["launcher"] and tuple(entry["launcher"])
        return cls(**{**entry, **tuples, "launcher": launcher})

    def as_json(self) -> dict[str, Any]:
        """Return what `read` needs."""
        return asdict(self)

    def check_versions(self) -> None:
        """Raise `PlatformError` if this interpreter would not understand the payload."""
        here = own_versions()
        if self.versions != here:
            raise PlatformError.because(
                f"a job of Python {self.versions[0]} with unisono {self.versions[1]}",
                f"on {python_platform.node()}: Python {here[0]} with unisono {here[1]}",
                None,
                "the same environment on all nodes, in a directory that they share",
            )


def own_versions() -> tuple[str, str]:
    """Return the versions that must agree: Python's first two numbers, and ours."""
    python = ".".join(python_platform.python_version_tuple()[:2])
    return python, unisono.__version__


def read_outcome(directory: Path, ranks: int, ending: Ending) -> Outcome:
    """Return what all ranks of a successful attempt returned, from private files of this user.

    Warns of ranks that returned, and then did not end as they should.
    """
    states = files.read_states(directory, ranks, ending.attempt)
    values: list[Parcel] = []
    for rank in range(ranks) if ending.state == "done" else ():
        path = files.result_path(directory, rank)
        job_files.check_ours(path)
        values.append(Parcel.in_file(path))
    for state in states:
        if state is not None and (state.warning or state.exit_code):
            how = state.warning or verdict.ending(state.exit_code)
            warn(f"rank {state.rank} returned its result, then {how}")
    return Outcome(
        values=values,
        is_requeued=ending.state == "requeued",
        hosts=[state.node or state.host if state else "" for state in states],
        start_s=ending.start_s,
        wall_s=ending.wall_s,
    )


def read_error(directory: Path, ranks: int, ending: Ending) -> RankFailed | RankTimeout:
    """Return the error of an attempt that did not succeed."""
    fates = read_fates(directory, ranks, ending.attempt)
    states = files.read_states(directory, ranks, ending.attempt)
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
    output = tail(directory / "starter.log").splitlines()[-verdict.LOG_LINES :]
    code = "" if ending.exit_code is None else f" (code {ending.exit_code})"
    lines = [f"{name_ranks(late)} of {ranks} ended without a word{code}"]
    lines += [f"  {line}" for line in output]
    lines.append(f"HINT: the host may have gone down; logs are in {directory}")
    return RankFailed(
        "\n".join(lines),
        rank=late[0] if late else None,
        host=fates[late[0]].host if late else None,
        exit_code=ending.exit_code,
        job_dir=str(directory),
        attempt=ending.attempt,
    )


def own_failure(directory: Path, ranks: int, attempt: int) -> RankFailed | RankTimeout | None:
    """Return the error of an attempt that was interrupted, where a rank did more than end."""
    fates = read_fates(directory, ranks, attempt)
    if not any(fate.is_own for fate in fates):
        return None
    return verdict.failure(fates, stacks={}, job_dir=str(directory), attempt=attempt)


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
        state = files.read_state(directory, rank, attempt)
        failed = files.read_error(directory, rank, attempt)
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

"""Ranks as processes of this host: what each is told, and one attempt to run a job on them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from unisono.environment import Environment
from unisono.launch import terminal
from unisono.launch.console import Console
from unisono.launch.parcel import Parcel
from unisono.launch.platform import Platform
from unisono.launch.process import ForkedRank, Pipes, RankProcess, ServerGone, spawn_rank
from unisono.launch.rank import Job, payload_file
from unisono.launch.supervise import Outcome, Supervisor
from unisono.launch.surroundings import rank_variables
from unisono.launch.warm import get_server, shutdown, why_not

_ANSWER_S = 120.0
"""Longest wait for the warm server, which may have to load torch first."""


def run_local(
    job: Job,
    *,
    console: Console,
    job_dir: Path,
    timeout_s: float | None,
    attempt: int = 0,
    on_start: Callable[[Supervisor], None] | None = None,
) -> Outcome:
    """Run `job` on processes of this host; return what they returned, or raise.

    Whatever happens, no rank, descriptor or thread of the run is left when this returns; the warm
    server stays. `on_start` is given the supervisor before ranks are started.
    """
    platform = job.platform
    run_id = secrets.token_hex(8)
    supervisor = Supervisor(
        console,
        start_timeout_s=platform.start_timeout_s,
        timeout_s=timeout_s,
        grace_s=platform.grace_s,
        interrupt_s=platform.interrupt_s,
        job_dir=job_dir,
        attempt=attempt,
        stack_signal=signal.Signals[platform.stack_signal],
    )
    payload_fd = payload_file(job)
    with supervisor:
        if on_start is not None:
            on_start(supervisor)
        size = platform.world_size
        places = [
            Environment(kind="unisono", rank=rank, size=size, local_rank=rank, local_size=size)
            for rank in range(size)
        ]
        own = [rank_variables(place, run_id, job_dir, attempt) for place in places]
        reader = terminal.stdin_rank(job.setting.environment, len(own))
        ranks = list(_forked(platform, own, payload_fd, job_dir, reader))
        for rank, variables in enumerate(own):
            if len(ranks) == rank:
                ranks.append(
                    spawn_rank(
                        rank,
                        len(own),
                        payload_fd=payload_fd,
                        env={**job.setting.environment, **variables},
                        job_dir=job_dir,
                        stdin_fd=0 if rank == reader else subprocess.DEVNULL,
                    )
                )
            supervisor.watch(ranks[rank])
        with terminal.lent_to(None if reader is None else ranks[reader].pid):
            return supervisor.until_all_returned()


def _forked(
    platform: Platform,
    own: Sequence[Mapping[str, str]],
    payload_fd: int,
    job_dir: Path,
    reader: int | None,
) -> Sequence[RankProcess]:
    """Return ranks forked by the warm server; none of them where fresh interpreters are needed."""
    if why_not(platform.spawn_method) is not None:
        return ()
    for _ in range(2):  # a server may have left, idle, at this very moment
        ranks: list[ForkedRank] = []
        try:
            for rank, variables in enumerate(own):
                ranks.append(_fork_rank(rank, variables, payload_fd, job_dir, rank == reader))
            refusals = [why for rank in ranks if (why := rank.confirm(_ANSWER_S)) is not None]
        except ServerGone:
            _give_up(ranks)
            shutdown()
            continue
        except BaseException:
            _give_up(ranks)
            raise
        if not refusals:
            return ranks
        _give_up(ranks)
        return ()
    return ()


def _fork_rank(
    rank: int, variables: Mapping[str, str], payload_fd: int, job_dir: Path, reads_stdin: bool
) -> ForkedRank:
    pipes = Pipes.open(rank, job_dir)
    status_read, status_write = os.pipe()
    try:
        stdin = (0,) if reads_stdin else ()
        get_server().fork(variables, (payload_fd, *pipes.theirs, status_write, *stdin))
    except BaseException:
        pipes.close_ours()
        os.close(status_read)
        raise
    finally:
        pipes.close_theirs()
        os.close(status_write)
    return ForkedRank(rank, status_read, pipes)


def _give_up(ranks: Sequence[ForkedRank]) -> None:
    """Let go of ranks that are not wanted; one that was started ends when its pipe closes."""
    for rank in ranks:
        rank.close()


def write_payload(job: Job, path: Path) -> None:
    """Write all that a rank is told to a private file, for ranks that share no descriptors."""
    fd = payload_file(job)
    Parcel(fd=fd).save(path, end=os.fstat(fd).st_size)

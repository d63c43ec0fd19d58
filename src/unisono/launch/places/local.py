"""Ranks as processes of this host: what each is told, and one attempt to run a job on them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from unisono.environment import Environment
from unisono.launch.console import Console, lent_to, stdin_rank
from unisono.launch.pool.client import RankProcess, fork_ranks, spawn_rank, why_not
from unisono.launch.pool.monitor import Outcome, Supervisor
from unisono.launch.pool.payload import Parcel
from unisono.launch.pool.protocol import Job, payload_file
from unisono.launch.pool.surroundings import rank_variables


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
        reader = stdin_rank(job.setting.environment, len(own))
        ranks: list[RankProcess] = []
        if why_not(platform.spawn_method) is None:
            ranks = fork_ranks(own, payload_fd=payload_fd, job_dir=job_dir, stdin_rank=reader)
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
        with lent_to(None if reader is None else ranks[reader].pid):
            return supervisor.until_all_returned()


def write_payload(job: Job, path: Path) -> None:
    """Write all that a rank is told to a private file, for ranks that share no descriptors."""
    fd = payload_file(job)
    Parcel(fd=fd).save(path, end=os.fstat(fd).st_size)

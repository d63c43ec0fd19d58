"""Ranks as processes of this host: what each is told, and one attempt to run a job on them."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.environment import Environment
from unisono.launch.console import Console, lent_to, stdin_rank
from unisono.launch.elastic.settings import Elastic
from unisono.launch.elastic.supervisor import PRELOAD, ElasticSupervisor
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
    elastic: Elastic | None = None,
) -> Outcome:
    """Run `job` on processes of this host; return what they returned, or raise.

    Whatever happens, no rank, descriptor or thread of the run is left when this returns; the warm
    server stays. `on_start` is given the supervisor before ranks are started. An `elastic` job goes
    on when ranks die.
    """
    platform = job.platform
    run_id, size = secrets.token_hex(8), platform.world_size
    payload_fd = payload_file(job)
    reader = None if elastic else stdin_rank(job.setting.environment, size)
    more: dict[str, str] = {}

    def start(numbers: Sequence[int]) -> list[RankProcess]:
        """Start these ranks, and watch them."""
        places = [
            Environment(kind="unisono", rank=rank, size=size, local_rank=rank, local_size=size)
            for rank in numbers
        ]
        own = [{**rank_variables(place, run_id, job_dir, attempt), **more} for place in places]
        if why_not(platform.spawn_method) is None:
            ranks = fork_ranks(
                own,
                payload_fd=payload_fd,
                job_dir=job_dir,
                stdin_rank=reader,
                preload=PRELOAD if elastic else (),
            )
        else:
            ranks = []
        for rank, variables in zip(numbers, own, strict=True):
            if len(ranks) < len(own):
                ranks.append(
                    spawn_rank(
                        rank,
                        size,
                        payload_fd=payload_fd,
                        env={**job.setting.environment, **variables},
                        job_dir=job_dir,
                        stdin_fd=0 if rank == reader else subprocess.DEVNULL,
                    )
                )
            supervisor.watch(ranks[rank - numbers[0]])
        return ranks

    settings: dict[str, Any] = {"timeout_s": timeout_s, "job_dir": job_dir, "attempt": attempt}
    if elastic is None:
        supervisor = Supervisor(console, platform, **settings)
    else:
        supervisor = ElasticSupervisor(
            console,
            platform,
            elastic=elastic,
            secret=job.secret,
            stall_s=platform.comm_timeout_s,
            listen_at=platform.master_addr,
            start=lambda rank: start([rank]),
            **settings,
        )
        more["UNISONO_ELASTIC"] = supervisor.address
    with supervisor:
        if on_start is not None:
            on_start(supervisor)
        ranks = start(range(size))
        with lent_to(None if reader is None else ranks[reader].pid):
            return supervisor.until_all_returned()


def write_payload(job: Job, path: Path) -> None:
    """Write all that a rank is told to a private file, for ranks that share no descriptors."""
    fd = payload_file(job)
    Parcel(fd=fd).save(path, end=os.fstat(fd).st_size)

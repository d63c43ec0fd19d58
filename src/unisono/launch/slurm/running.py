"""`run(on="slurm")`: submit, show the logs, wait. Ctrl-C ends the job, the second at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from unisono.launch import job_files
from unisono.launch.console import Console
from unisono.launch.conventions import Convention
from unisono.launch.file_outcome import own_failure
from unisono.launch.following import LogFollower
from unisono.launch.platform import Platform
from unisono.launch.pool.remote import INTERRUPT, LEAVE_S
from unisono.launch.request import Request
from unisono.launch.results import Results
from unisono.launch.run import telling
from unisono.launch.slurm.job import SlurmJob
from unisono.launch.slurm.submission import submit
from unisono.launch.stopping import announce, first_told_to, signals_of_launcher

_PAUSE_S = 0.05


def run_on_slurm(request: Request, convention: Convention) -> Results[Any]:
    """Run a request as a job and return what its ranks returned."""
    logs, shown = request.logs, request.logs.shown(request.ranks)
    console = Console(shown, prefix=logs.prefix and request.ranks > 1)
    platform = request.platform.copy()
    platform.upon_finish = None  # that is for rank 0
    with telling(platform), signals_of_launcher():
        job = submit(request, convention, is_tied=True)
        follower = LogFollower(job.dir, console, shown)
        told = 0
        interrupted: list[float] = []
        try:
            with first_told_to(lambda: interrupted.append(time.monotonic())):
                while not job.done():
                    follower.look()
                    if logs.console != "none":
                        told += _tell(job.announcements()[told:])
                    if interrupted and not (job.dir / INTERRUPT).exists():
                        _interrupt(job, platform, is_shown=logs.console != "none")
                    limit_s = platform.interrupt_s + platform.grace_s + LEAVE_S
                    if interrupted and time.monotonic() > interrupted[0] + limit_s:
                        raise KeyboardInterrupt
                    time.sleep(_PAUSE_S)
        except BaseException:
            job.cancel()
            raise
        finally:
            follower.close()
        if interrupted:
            raise KeyboardInterrupt from own_failure(job.dir, job.ranks, job.attempt)
        return job.result()


def _interrupt(job: SlurmJob, platform: Platform, *, is_shown: bool) -> None:
    """Have the ranks of a job save and end; one that has none yet is cancelled."""
    if job.status() != "running":
        raise KeyboardInterrupt
    if is_shown:
        announce(platform.interrupt_s)
    job_files.write_private(job.dir / INTERRUPT, b"")


def _tell(lines: Sequence[str]) -> int:
    """Say why there are more attempts; return how many lines that were."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return len(lines)

"""`run(on="slurm")`: submit, show the logs, wait. Ctrl-C cancels the job."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from unisono.launch.console import Console
from unisono.launch.conventions import Convention
from unisono.launch.following import LogFollower
from unisono.launch.interrupts import termination_as_exception
from unisono.launch.request import Request
from unisono.launch.results import Results
from unisono.launch.run import telling
from unisono.launch.slurm.submission import submit

_PAUSE_S = 0.05


def run_on_slurm(request: Request, convention: Convention) -> Results[Any]:
    """Run a request as a job and return what its ranks returned."""
    logs, shown = request.logs, request.logs.shown(request.ranks)
    console = Console(shown, prefix=logs.prefix and request.ranks > 1)
    platform = request.platform.copy()
    platform.upon_finish = None  # that is for rank 0
    with telling(platform), termination_as_exception():
        job = submit(request, convention, is_tied=True)
        follower = LogFollower(job.dir, console, shown)
        told = 0
        try:
            while not job.done():
                follower.look()
                if logs.console != "none":
                    told += _tell(job.announcements()[told:])
                time.sleep(_PAUSE_S)
        except BaseException:
            job.cancel()
            raise
        finally:
            follower.close()
        return job.result()


def _tell(lines: Sequence[str]) -> int:
    """Say why there are more attempts; return how many lines that were."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return len(lines)

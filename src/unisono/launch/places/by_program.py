"""One attempt to run a job on ranks that a program starts: `mpiexec`, or ours for ssh and Ray.

The program starts an agent for each rank; what becomes of the ranks is read from the files of the
run, so their fates, logs and deadlines are those of local ranks.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from unisono.errors import JobCancelled, PlatformError
from unisono.launch import job_files
from unisono.launch.console import STDIN_VARIABLE, Console, stdin_rank
from unisono.launch.logs import LogFollower, text_from
from unisono.launch.places import mailbox, mirror
from unisono.launch.places.local import write_payload
from unisono.launch.places.mailbox import Plan
from unisono.launch.places.remote import RemoteSupervisor, own_failure, read_error, read_outcome
from unisono.launch.pool.monitor import Outcome
from unisono.launch.pool.protocol import Job
from unisono.launch.stopping import announce, first_told_to


class How(TypedDict):
    """What an attempt is told besides the job."""

    console: Console
    """Where output is shown."""
    job_dir: Path
    """Directory of the run."""
    timeout_s: float | None
    """Deadline of the function."""
    attempt: NotRequired[int]
    """Number of the attempt."""
    on_start: NotRequired[Callable[[RemoteSupervisor], None] | None]
    """Given the watch over the ranks before they are started."""


def run_on_copies(job: Job, place: str, entry: Mapping[str, Any], how: How) -> Outcome:
    """Run `job` on hosts that need share no directory, by our own program for that place.

    `entry` is what the program has to know, beside the plan, in `job.json`. The variables of this
    process stay here, but for those that are meant for ranks.
    """
    environment = job.setting.environment
    told = mirror.job_entry(environment)
    variables = {**told.pop("variables"), **(job.platform.env or {})}
    return run_by_program(
        replace(
            job,
            setting=replace(job.setting, environment={}),
            platform=job.platform.but(env=variables),
        ),
        [sys.executable, "-P", "-m", f"unisono.launch.places.{place}"],
        environment=environment,
        entry={**told, place: dict(entry)},
        **how,
    )


def run_by_program(
    job: Job,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    console: Console,
    job_dir: Path,
    timeout_s: float | None,
    attempt: int = 0,
    on_start: Callable[[RemoteSupervisor], None] | None = None,
    entry: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run `job` on ranks that `command` starts; return what they returned, or raise.

    Whatever happens, neither the program nor a rank is left when this returns.

    Args:
        job: what ranks are told.
        command: the program, to which the directory and the number of the attempt are added.
        environment: its variables.
        console: where output is shown.
        job_dir: directory of the run.
        timeout_s: deadline of the function.
        attempt: number of the attempt.
        on_start: given the watch over the ranks before they are started.
        entry: more for `job.json`.
    """
    platform = job.platform
    size = platform.world_size
    if stdin_rank(environment, size) is not None:
        raise PlatformError.because(
            f'{STDIN_VARIABLE} with on="{platform.kind.value}"',
            "ranks of another program, which have no terminal",
            None,
            'on="cpu", where one rank can have it, or on="inline"',
        )
    me = os.getpid()
    plan = Plan.of(
        platform,
        run_id=secrets.token_hex(8),
        timeout_s=timeout_s,
        max_restarts=0,
        launcher=(socket.gethostname(), me, job_files.process_start(me) or 0),
    )
    job_files.update_state(job_dir, {"plan": plan.as_json(), **(entry or {})})
    write_payload(job, job_dir / mailbox.PAYLOAD)
    follower = LogFollower(job_dir, console, range(size), tail=0)
    told = 0

    def look() -> None:
        nonlocal told
        follower.look()
        if (text := text_from(job_dir / mirror.NOTICE, told)) and console.shows_any:
            told += len(text.encode())
            print(text, end="", file=sys.stderr, flush=True)

    supervisor = RemoteSupervisor(
        job_dir,
        plan,
        attempt,
        [*command, str(job_dir), str(attempt)],
        env=environment,
        on_tick=look,
    )
    if on_start is not None:
        on_start(supervisor)

    def interrupt() -> None:
        if console.shows_any:
            announce(platform.interrupt_s)
        supervisor.interrupt()

    try:
        with first_told_to(lambda: supervisor.ask(interrupt)):
            ending = supervisor.run()
    finally:
        follower.close()
    if supervisor.is_interrupted:
        raise KeyboardInterrupt from own_failure(job_dir, size, attempt)
    if reason := text_from(job_dir / mirror.REFUSED):
        raise PlatformError(reason)
    if ending.state == "cancelled":
        raise JobCancelled(f"the run in {job_dir} was cancelled")
    if ending.state not in ("done", "requeued"):
        raise read_error(job_dir, size, ending)
    return read_outcome(job_dir, size, ending)

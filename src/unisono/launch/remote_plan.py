"""What the processes of a job on other hosts have to know, as plain data in `job.json`.

The starter of a world (a batch driver, the launcher of MPI ranks) and the minder of each rank read
it; neither unpickles anything of the user's.
"""

from __future__ import annotations

import platform as python_platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import unisono
from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.platform import Platform


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
        return cls(
            run_id=run_id,
            ranks=platform.world_size,
            ranks_per_node=platform.ranks_per_node,
            nodes=platform.n_nodes,
            cpus_per_rank=platform.cpus_per_rank,
            env=dict(platform.env or {}),
            start_timeout_s=platform.start_timeout_s,
            timeout_s=timeout_s,
            grace_s=platform.grace_s,
            interrupt_s=platform.interrupt_s,
            max_restarts=max_restarts,
            max_requeues=platform.max_requeues,
            stop_signals=tuple(platform.stop_signals),
            stack_signal=platform.stack_signal,
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

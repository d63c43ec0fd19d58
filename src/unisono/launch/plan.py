"""The plain facts of a run that supervisor, agents and ranks all know from its start."""

from __future__ import annotations

import platform as python_platform
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import unisono
from unisono.launch.platform import Platform

AWAY_S = 3.0
"""How long the connection to members of an elastic training may be away, unless the user says."""


def own_versions() -> list[str]:
    """Return the versions that must agree: Python's first two numbers, and ours."""
    return [".".join(python_platform.python_version_tuple()[:2]), unisono.__version__]


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What is decided about a run before its first rank starts."""

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
    lost_after_s: float
    """How long a connection to an agent may be away before its rank is given up."""
    max_restarts: int
    """Attempts after a failure."""
    max_requeues: int
    """Attempts that the function itself may ask for."""
    stop_signals: Sequence[str]
    """Signals that ask a rank to stop."""
    stack_signal: str
    """Signal at which a rank writes its stacks."""
    srun_args: Sequence[str]
    """More words for `srun`."""
    versions: Sequence[str] = field(default_factory=own_versions)
    """Python and unisono of whoever made the plan."""
    elastic: dict[str, Any] | None = None
    """For ranks that may die: `least`, the fewest members, and `stall_s`, how long these may wait
    for another one."""

    @classmethod
    def of(
        cls,
        platform: Platform,
        *,
        timeout_s: float | None,
        max_restarts: int,
        elastic: dict[str, Any] | None = None,
    ) -> RunPlan:
        """Return the plan of a checked platform."""
        return cls(
            ranks_per_node=platform.ranks_per_node,
            cpus_per_rank=platform.cpus_per_rank,
            start_timeout_s=platform.start_timeout_s,
            grace_s=platform.grace_s,
            interrupt_s=platform.interrupt_s,
            # Others do the work of a member that is away: there is no need to wait for long.
            lost_after_s=platform.lost_after_s
            if elastic is None or platform.is_explicit("lost_after_s")
            else AWAY_S,
            max_requeues=platform.max_requeues,
            stack_signal=platform.stack_signal,
            run_id=secrets.token_hex(8),
            ranks=platform.world_size,
            nodes=platform.n_nodes,
            env=dict(platform.env or {}),
            timeout_s=timeout_s,
            max_restarts=max_restarts,
            stop_signals=list(platform.stop_signals),
            srun_args=list(platform.srun_args),
            elastic=elastic,
        )

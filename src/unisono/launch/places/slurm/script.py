"""What SLURM is told: the batch script of a job, and the `srun` line of an attempt. Pure text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import PlatformError
from unisono.launch.places.mailbox import Plan
from unisono.launch.platform import Platform

_FIXED = ("requeue", "open-mode", "signal")
"""What a restart after a requeue depends on; nobody can change it."""
_WITH_DEATHS = ("--kill-on-bad-exit=0", "--no-kill", "--wait=0")
"""Ranks, and nodes, may die without the others."""


def warning_s(timeout_min: int | None) -> int:
    """Return how many seconds before the time limit ranks are warned.

    Long enough to save, and a fifth of a short job at most.

    Example:
        >>> warning_s(2), warning_s(60)
        (24, 90)
    """
    return 90 if timeout_min is None else int(max(10, min(90, 0.2 * 60 * timeout_min)))


def directives(
    platform: Platform, output: Path | str, *, partition: str | None, is_elastic: bool = False
) -> dict[str, str]:
    """Return the options of `sbatch`; an empty value is an option without one.

    Args:
        platform: what is asked for; its `slurm_additional_parameters` win over the rest.
        output: file for the output of the batch script itself.
        partition: name to send, if any.
        is_elastic: whether the job goes on when a node fails.
    """
    options: dict[str, object] = {
        "job-name": platform.name,
        "partition": partition,
        "nodes": platform.n_nodes,
        "ntasks-per-node": platform.ranks_per_node,
        "cpus-per-task": platform.cpus_per_rank,
        "gpus-per-node": platform.n_gpus_per_node or None,
        "mem": None if platform.mem_per_node is None else f"{platform.mem_per_node}G",
        "time": platform.timeout_min,
        "output": str(output).replace("%", "%%"),
        "no-kill": True if is_elastic else None,
    }
    more = platform.slurm_additional_parameters or {}
    for name, value in more.items():
        if (word := name.replace("_", "-").lstrip("-")) not in _FIXED:
            options[word] = value
    options |= {
        "open-mode": "append",
        "requeue": True,
        "signal": f"USR2@{warning_s(platform.timeout_min)}",
    }
    words = {name: value for name, value in options.items() if value is not None}
    return {n: "" if v is True else str(v) for n, v in words.items() if v is not False}


def batch_script(options: Mapping[str, str], command: str) -> str:
    """Return the script with these options and this command."""
    lines = ["#!/bin/bash"]
    for name, value in options.items():
        if "\n" in value:
            raise PlatformError.because(
                f"the option --{name}={value!r} of a batch script", "a line break in it"
            )
        lines.append(f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else ""))
    return "\n".join([*lines, "", command, ""])


def driver_command(directory: Path) -> str:
    """Return the line that runs the driver of the job in `directory`."""
    words = [sys.executable, "-m", "unisono.launch.places.slurm.driver", str(directory)]
    return f"exec {shlex.join(words)}"


def srun_command(plan: Plan) -> list[str]:
    """Return the words that start an agent for each rank, in order of the nodes.

    `--cpus-per-task` is said again because newer `srun` do not take it from the job.
    """
    return [
        "srun",
        f"--nodes={plan.nodes}",
        f"--ntasks={plan.ranks}",
        f"--ntasks-per-node={plan.ranks_per_node}",
        f"--cpus-per-task={plan.cpus_per_rank}",
        "--distribution=block",
        *(["--kill-on-bad-exit=1"] if plan.elastic is None else _WITH_DEATHS),
        *plan.srun_args,
        sys.executable,
        "-m",
        "unisono.launch.places.agent",
    ]

"""What `unisono doctor` says of a SLURM cluster."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from unisono.cli.check import Check

_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")


def check_slurm() -> Check:
    """Whether jobs can be submitted from here."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if len(missing) == len(_PROGRAMS):
        return Check("slurm", "skip", "not on this machine", "a login node, to use a cluster")
    if missing:
        fix = "apt install slurm-client, or a login node of the cluster"
        return Check("slurm", "FAIL", f"no {', '.join(missing)}", fix)
    from unisono.errors import PlatformError
    from unisono.launch.slurm import commands

    try:
        known = commands.partitions(timeout_s=10.0)
    except PlatformError as error:
        words = [line.strip() for line in str(error).splitlines() if "HINT:" not in line]
        found = f"programs are there, but no cluster answers ({words[-1]})"
        fix = (
            "to use one: SLURM_CONF=/path/of/slurm.conf, and scontrol ping to see whether it is up"
        )
        return Check("slurm", "warn", found, fix)
    names = [
        f"{p.name}{' (default)' if p.is_default else ''}: {p.nodes} nodes, {p.limit}" for p in known
    ]
    return Check("slurm", "ok", "; ".join(names))


def check_preemption() -> Check:
    """Whether the cluster lets a job save its work and start again."""
    from unisono.launch.slurm import commands

    settings = commands.configuration()
    may_requeue = settings.get("JobRequeue", "1") == "1"
    preempts = settings.get("PreemptMode", "OFF") != "OFF"
    sends = "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
    found = f"requeue {'allowed' if may_requeue else 'off'}, pre-emption " + (
        "off" if not preempts else "by USR2" if sends else "by TERM"
    )
    if not may_requeue:
        fix = "jobs ask for it themselves (--requeue); ask the administrators for JobRequeue=1"
        return Check("requeue", "warn", found, fix)
    return Check("requeue", "ok", found)


def check_shared_directory() -> Check:
    """Whether a node sees the directory from which jobs are submitted."""
    from unisono.launch.slurm import commands

    directory = Path(".unisono").absolute()
    was_there = directory.exists()
    probe = directory / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
    probe.mkdir(mode=0o700, parents=True)
    try:
        words = ("srun", "--immediate=30", "--ntasks=1", "--time=1", "ls", "-d", str(probe))
        seen = commands.call(*words, check=False, timeout_s=60.0)
    finally:
        probe.rmdir()
        if not was_there:
            directory.rmdir()
    if str(probe) in seen:
        return Check("shared", "ok", f"a node sees {directory.parent}")
    fix = "logs= with a directory that all nodes share; sinfo shows whether a node is free"
    return Check("shared", "warn", f"no node has answered for {directory.parent}", fix)

"""SLURM's programs, and what they print. Never `sacct`: many clusters keep no accounts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import PlatformError

ANSWER_S = 60.0
"""Longest wait for an answer of the controller."""


@dataclass(frozen=True)
class Partition:
    """One line of `sinfo`."""

    name: str
    """Its name."""
    is_default: bool
    """Whether jobs without a partition go there."""
    nodes: int
    """How many nodes it has."""
    cpus: int
    """CPUs of its smallest node."""
    limit: str
    """Longest time of a job, as SLURM writes it."""


def call(*words: str, check: bool = True, timeout_s: float = ANSWER_S) -> str:
    """Run one of SLURM's programs and return what it prints.

    Raises `PlatformError` with its own words if it fails and `check` holds.
    """
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise not_found(words[0]) from error
    except subprocess.TimeoutExpired as error:
        raise PlatformError.because(
            " ".join(words), f"no answer within {timeout_s:g} s", None, "scontrol ping"
        ) from error
    if check and done.returncode:
        raise PlatformError.because(
            " ".join(words),
            done.stderr.strip() or f"exit code {done.returncode}",
            None,
            "scontrol ping tells whether a cluster answers; SLURM_CONF=/path/of/slurm.conf names "
            "another one",
        )
    return done.stdout if check or done.returncode == 0 else ""


def not_found(program: str) -> Exception:
    """Return the error for a machine without this program."""
    return PlatformError.because(
        'on="slurm" needs the programs of SLURM',
        f"no {program} on PATH ({os.environ.get('PATH', '')})",
        None,
        'a login node of the cluster; on="cpu" rehearses the same function here',
    )


def is_installed() -> bool:
    """Whether the programs needed to submit jobs are on PATH."""
    return all(shutil.which(name) for name in ("sbatch", "srun", "squeue", "scontrol"))


def partitions(timeout_s: float = ANSWER_S) -> list[Partition]:
    """Return the partitions of the cluster."""
    found: list[Partition] = []
    words = ("sinfo", "--noheader", "--format=%P|%D|%c|%l")
    for line in call(*words, timeout_s=timeout_s).splitlines():
        name, nodes, cpus, limit = line.strip().split("|")
        smallest = int(re.sub(r"\D.*", "", cpus) or 0)
        plain = name.removesuffix("*")
        found.append(Partition(plain, name != plain, int(nodes), smallest, limit))
    return _joined(found)


def _joined(lines: Sequence[Partition]) -> list[Partition]:
    """Put the lines of one partition together; `sinfo` has one for each kind of node."""
    known: dict[str, Partition] = {}
    for line in lines:
        if (old := known.get(line.name)) is not None:
            nodes, cpus = old.nodes + line.nodes, min(old.cpus, line.cpus)
            line = Partition(line.name, line.is_default, nodes, cpus, line.limit)
        known[line.name] = line
    return list(known.values())


def queue_of_user() -> dict[str, tuple[str, str]]:
    """Return state and reason of all jobs of this user that the controller remembers."""
    text = call(
        "squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%i|%T|%r"
    )
    jobs: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        job, state, reason = line.strip().split("|", 2)
        jobs[job] = (state, reason)
    return jobs


def show_job(job: str) -> dict[str, str]:
    """Return what the controller knows of a job; nothing once it has forgotten it."""
    return _fields(call("scontrol", "--oneliner", "show", "job", job, check=False))


def directory_of_job(job: str) -> Path | None:
    """Return the directory of a job of ours, which is where its output goes."""
    if not job.isdigit() or not is_installed():
        return None
    output = show_job(job).get("StdOut")
    return Path(output).parent if output else None


def node_address(node: str) -> str | None:
    """Return the address by which the controller reaches a node."""
    try:
        return _fields(call("scontrol", "--oneliner", "show", "node", node)).get("NodeAddr")
    except PlatformError:
        return None


def configuration() -> dict[str, str]:
    """Return the cluster's settings."""
    pairs = (line.partition("=") for line in call("scontrol", "show", "config").splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _fields(text: str) -> dict[str, str]:
    """Read `Name=value Name=value`; a value may hold blanks but no second name."""
    found = re.findall(r"(?:^|\s)([A-Z][\w:/]*)=(.*?)(?=\s[A-Z][\w:/]*=|\s*$)", text.strip())
    return dict(found)

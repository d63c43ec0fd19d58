"""The cluster: SLURM's programs, and what they print.

Never `sacct`: many clusters keep no accounts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from unisono.errors import PYTHON, PlatformError, Spelling
from unisono.launch.platform import Platform
from unisono.launch.pool.protocol import RunPlan

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
"""What has to be there to submit jobs, and to look after them."""
ANSWER_S = 60.0
"""Longest wait for an answer of the controller."""
PAUSE_S = 3.0
"""Seconds between two questions."""
_SPECIAL_STEPS = 0xFFFFFFFA
"""Steps from this number on are no steps of the user's, as the shell of `salloc`."""


def call(*words: str, text: str = "", check: bool = True, timeout_s: float = ANSWER_S) -> str:
    """Run one of SLURM's programs, which reads `text`, and return what it prints.

    Raises `PlatformError` with its own words if it fails and `check` holds.
    """
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise _not_found(words[0]) from error
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
    # `sbatch --test-only` says on the other stream that all is well.
    return "" if done.returncode else done.stderr if text else done.stdout


def _not_found(program: str, spelling: Spelling = PYTHON) -> Exception:
    return PlatformError.because(
        f"{spelling.options(on='slurm')} needs the programs of SLURM",
        f"no {program} on PATH ({os.environ.get('PATH', '')})",
        None,
        f"a login node of the cluster; {spelling.options(on='cpu')} rehearses the same here",
    )


def missing_programs() -> list[str]:
    """Return which of SLURM's programs are not on PATH."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def check_programs(spelling: Spelling = PYTHON) -> None:
    """Raise `PlatformError` unless jobs can be submitted from here."""
    if missing := missing_programs():
        raise _not_found(missing[0], spelling)


def in_allocation() -> bool:
    """Whether this process has nodes already: inside `salloc` or a batch script, in no step."""
    step = os.environ.get("SLURM_STEP_ID", str(_SPECIAL_STEPS))
    return "SLURM_JOB_ID" in os.environ and step.isdigit() and int(step) >= _SPECIAL_STEPS


def srun_options(plan: RunPlan) -> list[str]:
    """Return the options of `srun` that start a task for each rank, in order of the nodes.

    The sizes are repeated: newer `srun` do not take them from the job. A task that ends does not
    end the others: the supervisor does.
    """
    return [
        f"--nodes={plan.nodes}",
        f"--ntasks={plan.ranks}",
        f"--ntasks-per-node={plan.ranks_per_node}",
        f"--cpus-per-task={plan.cpus_per_rank}",
        *("--distribution=block", "--kill-on-bad-exit=0", "--wait=0"),
        *(["--no-kill"] if plan.elastic is not None else []),
        *plan.srun_args,
    ]


def partitions(timeout_s: float = ANSWER_S) -> list[str]:
    """Return a line for each partition of the cluster; a star marks the default one."""
    words = ("sinfo", "--noheader", "--format=%P: %D nodes, %l")
    return [line.strip() for line in call(*words, timeout_s=timeout_s).splitlines()]


def check_nodes(platform: Platform, spelling: Spelling = PYTHON) -> None:
    """Raise if a partition has too few nodes for a job: many clusters let it wait for ever."""
    sizes = Counter[str]()
    for line in call("sinfo", "--noheader", "--format=%P|%D").splitlines():
        partition, _, count = line.strip().partition("|")
        sizes[partition] += int(count)
    if platform.partition is not None and platform.is_explicit("partition"):
        names = platform.partition.split(",")
    else:
        names = [name.removesuffix("*") for name in sizes if name.endswith("*")]
    most = max((sizes[name] + sizes[f"{name}*"] for name in names), default=0)
    if 0 < most < platform.n_nodes:  # sbatch refuses a partition that does not exist
        raise PlatformError.because(
            f"{platform.n_nodes} nodes of partition {','.join(names)!r}",
            f"it has {most}",
            f"{platform.n_nodes} nodes > {most}",
            spelling.options(nodes=most),
        )


def show_job(job: str) -> dict[str, str]:
    """Return what the controller knows of a job; nothing once it has forgotten it."""
    return _fields(call("scontrol", "--oneliner", "show", "job", job, check=False))


def this_job() -> str:
    """Return the id of the job that this process is a part of.

    By `SLURM_JOB_ID` alone the controller would answer for all jobs of an array.
    """
    number, place = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{number}_{place}" if number and place else os.environ["SLURM_JOB_ID"]


def directory_of_job(job: str) -> Path | None:
    """Return the directory of a job of ours, which is where its output goes."""
    if not job.replace("_", "", 1).isdigit() or missing_programs():
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
    pairs = re.findall(r"(?:^|\s)([A-Z][\w:/]*)=(.*?)(?=\s[A-Z][\w:/]*=|\s*$)", text.strip())
    return dict(pairs)


class Queue:
    """Remembers the last answer of `squeue` for a while. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[str, str]] = {}
        self._next = 0.0

    def forget(self) -> None:
        """Ask again next time."""
        self._next = 0.0

    def look(self, job: str) -> tuple[str, str] | None:
        """Return state and reason of a job; None once the controller has forgotten it."""
        with self._lock:
            if time.monotonic() >= self._next:
                words = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r")
                with suppress(PlatformError):  # the controller is busy or being restarted
                    lines = call("squeue", f"--user={os.getuid()}", *words).splitlines()
                    rows = (line.strip().split("|", 2) for line in lines)
                    self._jobs = {job: (state, reason) for job, state, reason in rows}
                self._next = time.monotonic() + PAUSE_S
            if job in self._jobs:
                return self._jobs[job]
        fields = show_job(job)  # it has left the queue, or was just submitted
        return (fields["JobState"], fields.get("Reason", "")) if "JobState" in fields else None


QUEUE = Queue()

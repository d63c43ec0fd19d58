"""The cluster: SLURM's programs and what they print, and what it does not have of what is asked.

Never `sacct`: many clusters keep no accounts.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import PYTHON, PlatformError, Spelling
from unisono.launch.platform import Platform
from unisono.launch.pool.protocol import RunPlan

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
"""What has to be there to submit jobs, and to look after them."""
ANSWER_S = 60.0
"""Longest wait for an answer of the controller."""
SHORTEST_S, LONGEST_S = 1.0, 10.0
"""Seconds between two questions: the longer nothing changes, the rarer they are."""
_SPECIAL_STEPS = 0xFFFFFFFA
"""Steps from this number on are no steps of the user's, as the shell of `salloc`."""
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True)
class Partition:
    """A part of the cluster with nodes and limits of its own."""

    name: str
    is_default: bool
    """Whether jobs without a partition go there."""
    nodes: int
    limit: str
    """Longest time of a job, as SLURM writes it."""
    usual: str = "n/a"
    """Time limit of a job that asks for none; `n/a`: the longest."""

    @property
    def minutes(self) -> int:
        """Time limit of a job that asks for none; 0 is none."""
        match = _TIME.fullmatch(self.limit if self.usual == "n/a" else self.usual)
        if match is None:  # infinite
            return 0
        days, hours, minutes = (int(number or 0) for number in match.groups()[:3])
        return max(1, (days * 24 + hours) * 60 + minutes)


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


def partitions(timeout_s: float = ANSWER_S) -> list[Partition]:
    """Return the partitions of the cluster; `sinfo` has a line for each kind of node."""
    by_name: dict[str, Partition] = {}
    words = ("sinfo", "--noheader", "--format=%P|%D|%l|%L")
    for line in call(*words, timeout_s=timeout_s).splitlines():
        word, nodes, limit, usual = line.strip().split("|")
        name, count = word.removesuffix("*"), int(nodes)
        if name in by_name:
            count += by_name[name].nodes
        by_name[name] = Partition(name, name != word, count, limit, usual)
    return list(by_name.values())


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


def check_cluster(platform: Platform, spelling: Spelling = PYTHON) -> tuple[str | None, int | None]:
    """Return partition and time limit of a job; raise `PlatformError` for a bad request.

    Errors spell options as the caller does.
    """
    check_programs(spelling)
    return choose_partition(platform, partitions(), spelling)


def choose_partition(
    platform: Platform, known: Sequence[Partition], spelling: Spelling = PYTHON
) -> tuple[str | None, int | None]:
    """Return the partition to name, if any, and the time limit in minutes, if one is known.

    A partition that the caller named must exist. That of DDPW's default is left out on a cluster
    that does not have it, with a line that says so.
    """
    names = [partition.name for partition in known]
    name = platform.partition
    if name is not None and not set(name.split(",")) <= set(names):
        if platform.is_explicit("partition"):
            near = difflib.get_close_matches(name, names, n=1)
            raise PlatformError.because(
                spelling.platform(partition=name),
                f"partitions of this cluster are {', '.join(names) or 'none'}",
                None,
                spelling.options(partition=near[0])
                if near
                else "leave it out for the cluster's default",
            )
        default = next((partition.name for partition in known if partition.is_default), "none")
        print(
            f"unisono: this cluster has no partition {name!r}; the default one is {default}",
            file=sys.stderr,
        )
        name = None
    chosen = [p for p in known if (p.name in name.split(",") if name else p.is_default)]
    most = max((partition.nodes for partition in chosen), default=None)
    if most is not None and platform.n_nodes > most:
        raise PlatformError.because(
            f"{platform.n_nodes} nodes of partition {name or chosen[0].name!r}",
            f"it has {most}",
            f"{platform.n_nodes} nodes > {most}",
            spelling.options(nodes=most),
        )
    usual = min((partition.minutes for partition in chosen), default=None)
    return name, usual if platform.timeout_min is None else platform.timeout_min


class Queue:
    """Remembers the last answer of `squeue` for a while. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[str, str]] = {}
        self.forget()

    def forget(self) -> None:
        """Ask again next time."""
        self._pause_s, self._next = SHORTEST_S, 0.0

    def look(self, job: str) -> tuple[str, str] | None:
        """Return state and reason of a job; None once the controller has forgotten it."""
        with self._lock:
            if time.monotonic() >= self._next:
                before = self._jobs
                with suppress(PlatformError):  # the controller is busy or being restarted
                    self._jobs = _jobs_of_user()
                is_new = self._jobs != before
                self._pause_s = SHORTEST_S if is_new else min(LONGEST_S, 1.5 * self._pause_s)
                self._next = time.monotonic() + self._pause_s
            if job in self._jobs:
                return self._jobs[job]
        fields = show_job(job)  # it has left the queue, or was just submitted
        return (fields["JobState"], fields.get("Reason", "")) if "JobState" in fields else None


def _jobs_of_user() -> dict[str, tuple[str, str]]:
    words = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r")
    lines = call("squeue", f"--user={os.getuid()}", *words).splitlines()
    rows = (line.strip().split("|", 2) for line in lines)
    return {job: (state, reason) for job, state, reason in rows}


QUEUE = Queue()

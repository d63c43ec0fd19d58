"""What a run should remember of its surroundings: machine, versions, command, git commit.

Environment variables are not among them: they hold secrets. So may a command line, which can be
left out; the files it goes into are for their owner's eyes only.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import unisono
from unisono.cores import usable_cores
from unisono.launch.devices import visible_gpus
from unisono.train.recording import directory as directories

_PACKAGES = ("torch", "numpy", "mpi4py", "submitit")
_GIT_S = 3.0


def begin_run(name: str, *, has_command: bool = True) -> tuple[str, int]:
    """Make the directory of a run; return it and the moment, in ns, that its clocks count from.

    `has_command` says whether the words of the command line are kept; else it is the program alone.
    """
    started_ns = time.time_ns()
    directory = directories.make_run_directory(name)
    known = run_facts(directory.name, started_ns)
    if not has_command:
        known["command"] = known["command"][:1]
    directories.write_json(directory / directories.CONFIG, known)
    return str(directory), started_ns


def run_facts(name: str, started_ns: int) -> dict[str, Any]:
    """Return what is the same for the whole run."""
    return {
        "name": name,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "directory": str(Path.cwd()),
        "started": datetime.fromtimestamp(started_ns / 1e9, UTC).isoformat(timespec="seconds"),
        "started_ns": started_ns,
        "machine": machine(),
        "versions": versions(),
        "git": git_commit(),
    }


def machine() -> dict[str, str]:
    """Return the facts of this host."""
    facts = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "processor": _processor(),
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
    }
    if gpus := visible_gpus():
        facts["GPUs"] = f"{gpus} visible"
    return facts


def versions() -> dict[str, str]:
    """Return the versions of Python, of unisono and of what it runs on."""
    found = {"python": platform.python_version(), "unisono": unisono.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> dict[str, Any] | None:
    """Return commit, branch and whether files differ from it; None outside of a repository."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    return {
        "commit": commit,
        "branch": _git("rev-parse", "--abbrev-ref", "HEAD"),
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    """Return the processor's name as its vendor gives it, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

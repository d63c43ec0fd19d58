"""The directory of a recorded run, and what a run remembers of its surroundings. No torch here.

`runs/<name>/` holds `config.json`, what each rank wrote (`rank-0.jsonl`, `rank-0.json`,
`rank-0.log`), and what is made of it: `metrics.csv`, `trace.json`, `report.html`.

Environment variables are not remembered: they hold secrets. So may a command line, which can be
left out; the files it goes into are for their owner's eyes only.
"""

from __future__ import annotations

import json
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
from unisono import accelerator
from unisono.cores import usable_cores
from unisono.errors import PlatformError
from unisono.launch.job_files import write_private

PARENT = "runs"
"""Where runs are kept, below the working directory."""
CONFIG = "config.json"
METRICS = "metrics.csv"
TRACE = "trace.json"
REPORT = "report.html"
COMPARISON = "comparison.json"
"""What `unisono compare` has found, where the record is of a comparison."""
_PACKAGES = ("torch", "numpy", "mpi4py", "submitit")
_GIT_S = 3.0


def begin_run(name: str, *, has_command: bool = True) -> tuple[str, int]:
    """Make the directory of a run; return it and the moment, in ns, that its clocks count from.

    `has_command` says whether the words of the command line are kept; else it is the program alone.
    """
    started_ns = time.time_ns()
    directory = make_run_directory(name)
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
    names = {
        "name": directory.name,
        "command": words if has_command else words[:1],
        "directory": str(Path.cwd()),
        "started": datetime.fromtimestamp(started_ns / 1e9, UTC).isoformat(timespec="seconds"),
        "started_ns": started_ns,
        "machine": machine(),
        "versions": versions(),
        "git": git_commit(),
    }
    write_json(directory / CONFIG, names)
    return str(directory), started_ns


def make_run_directory(name: str) -> Path:
    """Make the directory of a new run and return it; `name-2`, ... where `name` is taken.

    A `name` with a slash in it is a path of its own. What another run wrote is never touched.
    """
    plain = "".join(c if c.isalnum() or c in "._-/" else "_" for c in name).strip("/.")
    if not plain:
        raise PlatformError.because(
            f"a run named {name!r}", "no letter or digit in it", hint='record("digits")'
        )
    first = Path(name) if "/" in name else Path(PARENT, plain)
    for number in range(1, 100_000):
        path = (first if number == 1 else first.with_name(f"{first.name}-{number}")).absolute()
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir() and not any(path.iterdir()):
                return path
        except OSError as error:
            raise PlatformError.because(
                f"a run named {name!r}",
                f"{path} cannot be made: {error.strerror}",
                hint="a working directory that you may write to",
            ) from error
        else:
            return path
    raise PlatformError.because(f"a run named {name!r}", f"no free name beside {first}")


def rank_file(directory: Path, rank: int, kind: str) -> Path:
    """Return a file of a rank.

    `log`: what it printed. `jsonl`: what it logged, one object a line. `json`: what it is, and at
    the end what it has measured.
    """
    return directory / f"rank-{rank}.{kind}"


def ranks_in(directory: Path) -> list[int]:
    """Return the ranks that have left something in the directory of a run."""
    numbers = {path.stem.removeprefix("rank-") for path in directory.glob("rank-*")}
    return sorted(int(number) for number in numbers if number.isdigit())


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value, for its owner's eyes only: tracebacks may hold secrets, too."""
    write_private(path, json.dumps(value).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; nothing if it is not there or not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def check_run(directory: Path, call: str) -> None:
    """Raise `PlatformError` unless `directory` is one of a run."""
    if not (directory / CONFIG).is_file():
        near = sorted(p.parent for p in Path(PARENT).glob(f"*/{CONFIG}"))
        raise PlatformError.because(
            call,
            f"no {CONFIG} in {directory}",
            hint=f"runs here: {', '.join(map(str, near[-8:]))}"
            if near
            else "unisono run --record NAME script.py writes one",
        )


def machine() -> dict[str, str]:
    """Return the facts of this host."""
    facts = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "processor": _processor(),
        "cores": f"{usable_cores()} usable of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
    }
    if gpus := accelerator.count():
        facts["GPUs"] = f"{gpus} visible"
    return facts


def versions() -> dict[str, str]:
    """Return the versions of Python, of unisono and of what it runs on."""
    versions = {"python": platform.python_version(), "unisono": unisono.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


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

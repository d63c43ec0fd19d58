"""Where the jobs of this user are: one link for each, named by the job's id.

So an id is enough to find a job from any directory, and jobs can be listed. A home that cannot be
written is no error: such a job is known by its directory alone.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from unisono.launch import job_files

FORGET_S = 30 * 24 * 3600.0
"""A link whose directory is not there is removed after so long; it may be another host's."""


def folder() -> Path:
    """Return the directory of the links."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "unisono", "jobs")


def remember(job: str, directory: Path) -> None:
    """Note where the job with this id is."""
    with suppress(OSError, RuntimeError):  # no home at all
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder() / f".{job}.{os.getpid()}"
        draft.symlink_to(directory)
        draft.replace(folder() / job)


def forget(job: str) -> None:
    """Remove the note of a job whose directory is gone."""
    with suppress(OSError, RuntimeError):
        (folder() / job).unlink()


def directories() -> dict[str, Path]:
    """Return id and directory of the jobs that are known and still there; near ones included."""
    links: list[Path] = []
    with suppress(OSError, RuntimeError):
        links = sorted(folder().iterdir())
    found: dict[str, Path] = {}
    for link in links:
        with suppress(OSError):
            if (link / job_files.STATE).is_file():
                found[link.name] = link.readlink()
            elif time.time() - link.lstat().st_mtime > FORGET_S:
                link.unlink()
    known = set(found.values())
    for path in sorted(job_files.LOCAL_JOBS.glob(f"*/{job_files.STATE}")):
        if path.parent.absolute() not in known:
            found[path.parent.name] = path.parent.absolute()
    return found

"""The files by which a job is known to other processes, and where the jobs of a user are.

`job.json` and what came out of it are written by the job's supervisor alone, each by a rename,
readable by their owner only. A folder of this user has a link to each job, named by its id, so that
is enough to find it from any directory. A home that cannot be written is no error: such a job is
known by its directory alone.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError

STATE = "job.json"
OUTCOME = "outcome.pkl"
LOCAL_JOBS = Path(".unisono", "jobs")
"""Where detached jobs are kept, below the working directory."""
FORGET_S = 30 * 24 * 3600.0
"""A link whose directory is not there is removed after so long; it may be another host's."""


def make_directory(parent: Path, name: str) -> Path:
    """Make a private directory of that name, with a word of its own added, below `parent`."""
    plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    path = parent / f"{plain}-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise PlatformError.because(
            f"a directory for a run, below {parent}",
            f"{path} cannot be made: {error.strerror}",
            None,
            "logs= with a directory of yours, which all nodes share",
        ) from error
    return path


@contextmanager
def appearing_whole(path: Path) -> Iterator[Path]:
    """Yield a draft to write; it gets its name at one stroke, or is removed if the block raises.

    So a reader finds the old content or the new one, whoever else writes the same file.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data` at one stroke; only its owner can read it, whatever the umask."""
    with appearing_whole(path) as draft:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(data)


def write_state(directory: Path, state: dict[str, Any]) -> None:
    """Write what is known of a job."""
    write_private(directory / STATE, json.dumps(state).encode())


def update_state(directory: Path, changes: dict[str, Any]) -> None:
    """Change some of what is known of a job, and keep the rest."""
    known = read_state(directory) if (directory / STATE).exists() else {}
    write_state(directory, {**known, **changes})


def read_state(directory: Path) -> dict[str, Any]:
    """Return what is known of a job, after a look at who wrote it."""
    check_ours(directory / STATE)
    return json.loads((directory / STATE).read_text(encoding="utf-8"))


def write_outcome(directory: Path, outcome: object) -> None:
    """Keep the results of a job, or its error; values may be functions of a main script."""
    import cloudpickle

    write_private(directory / OUTCOME, cloudpickle.dumps(outcome))


def read_outcome(directory: Path) -> Any:
    """Return the results of a job, or its error; unpickles only a private file of this user."""
    check_ours(directory)
    check_ours(directory / OUTCOME)
    return pickle.loads((directory / OUTCOME).read_bytes())


def check_ours(path: Path) -> None:
    """Raise `PlatformError` unless `path` is this user's own, closed to others, and no link."""
    try:
        found = path.lstat()
    except OSError as error:
        raise PlatformError.because(f"{path}", f"{error.strerror}") from error
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        kind = "a link" if stat.S_ISLNK(found.st_mode) else f"mode {mode:04o}"
        raise PlatformError.because(
            f"{path} holds what a job left",
            f"{kind}, owner {found.st_uid} (this user is {os.getuid()})",
            None,
            "only a private file of your own is read",
        )


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
            if (link / STATE).is_file():
                found[link.name] = link.readlink()
            elif time.time() - link.lstat().st_mtime > FORGET_S:
                link.unlink()
    known = set(found.values())
    for path in sorted(LOCAL_JOBS.glob(f"*/{STATE}")):
        with suppress(PlatformError, ValueError):
            # Runs that somebody waits for have such a file, too, but no id.
            if path.parent.absolute() not in known and "id" in read_state(path.parent):
                found[path.parent.name] = path.parent.absolute()
    return found

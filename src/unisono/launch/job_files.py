"""Private files and directories of runs: written at one stroke, read back only if they are ours."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError


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

    So a reader finds the old content or the new one, also if others write the same file.
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


def check_ours(path: Path) -> None:
    """Raise `PlatformError` unless `path` is this user's own, closed to others, and no link."""
    try:
        status = path.lstat()
    except OSError as error:
        raise PlatformError.because(f"{path}", f"{error.strerror}") from error
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        kind = "a link" if stat.S_ISLNK(status.st_mode) else f"mode {mode:04o}"
        raise PlatformError.because(
            f"{path} holds what a job left",
            f"{kind}, owner {status.st_uid} (this user is {os.getuid()})",
            None,
            "only a private file of your own is read",
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a private file of ours; None if it is not there, or not yet whole."""
    try:
        check_ours(path)
    except PlatformError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # replaced at this moment, on a network file system
        return None
    return content if isinstance(content, dict) else None

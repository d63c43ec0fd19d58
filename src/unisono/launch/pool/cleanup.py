"""What a run may leave behind when something dies: processes of ranks, temporary directories.

A process that a rank started in a session of its own is in no group that we could end; but it has
the rank's variables, by which it is found (on Linux).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unisono.launch.job_files import check_ours, process_start, write_private

MARK = ".temporary"
"""File in a directory that nobody wants once its launcher has ended."""
KEPT = ".kept"
"""File in a directory that a failed run has left for its user to look at."""
KEEP_S = 7 * 24 * 3600.0
"""How long such a directory stays."""
KEEP_COUNT = 20
"""How many of them stay, the latest ones."""
_GIVE_UP_S = 2.0


def end_processes_of(run_id: str, rank: str) -> None:
    """Kill all processes that the rank of that run started, directly or not."""
    end = time.monotonic() + _GIVE_UP_S
    while (pids := _marked(run_id, rank)) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _marked(run_id: str, rank: str) -> list[int]:
    """Return the processes of this user, but for this one, that have the variables of the rank."""
    wanted = {f"UNISONO_RUN_ID={run_id}".encode(), f"RANK={rank}".encode()}
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or another user's
            pid = int(path.name)
            if pid != os.getpid() and wanted <= set((path / "environ").read_bytes().split(b"\0")):
                found.append(pid)
    return found


def unused_memory(segments: Iterable[Path]) -> list[Path]:
    """Return the files of shared memory of this user that no process has mapped."""
    if not (candidates := list(segments)):
        return []
    maps: list[str] = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # gone, or another user's
            maps.append(path.read_text())
    unused: list[Path] = []
    for segment in candidates:
        with suppress(OSError):
            if segment.stat().st_uid == os.getuid() and not any(str(segment) in m for m in maps):
                unused.append(segment)
    return unused


def make_temporary_directory(parent: Path | None) -> Path:
    """Make a private directory that ends with its launcher; clear away those of dead ones."""
    remove_orphaned_directories(parent)
    remove_expired_directories(parent)
    path = Path(tempfile.mkdtemp(prefix="unisono-", dir=parent))
    owner = f"{os.getpid()} {process_start(os.getpid())} {socket.gethostname()}"
    write_private(path / MARK, owner.encode())
    return path


def keep_directory(path: Path) -> None:
    """Let a temporary directory outlive its launcher, for a time."""
    with suppress(OSError):  # a full disk: it stays, without an end
        write_private(path / KEPT, b"")
    (path / MARK).unlink(missing_ok=True)


def remove_expired_directories(parent: Path | None) -> None:
    """Remove what failed runs have left: what is older than `KEEP_S`, and all but `KEEP_COUNT`.

    Only private directories of this user that `keep_directory` has marked; a run that goes on has
    no such mark.
    """
    kept: list[tuple[float, Path]] = []
    for mark in (parent or Path(tempfile.gettempdir())).glob(f"unisono-*/{KEPT}"):
        with suppress(OSError, ValueError):  # another user's, or being removed
            check_ours(mark.parent)
            check_ours(mark)
            if not (mark.parent / MARK).exists():
                kept.append((mark.lstat().st_mtime, mark.parent))
    kept.sort(reverse=True)
    for place, (at, path) in enumerate(kept):
        if place >= KEEP_COUNT or time.time() - at > KEEP_S:
            shutil.rmtree(path, ignore_errors=True)


def remove_orphaned_directories(parent: Path | None) -> None:
    """Remove temporary directories whose launchers, of this host, have been killed."""
    for mark in (parent or Path(tempfile.gettempdir())).glob(f"unisono-*/{MARK}"):
        with suppress(OSError, ValueError):  # another user's, or being removed
            check_ours(mark)
            pid, start, host = mark.read_text().split()
            if host == socket.gethostname() and str(process_start(int(pid))) != start:
                shutil.rmtree(mark.parent, ignore_errors=True)

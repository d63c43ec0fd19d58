"""What a run may leave behind when a process dies: processes of ranks, temporary directories.

A process that a rank started in a session of its own is in no group of ours, but it has the
variables of the rank, by which it is found (on Linux).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from unisono.launch.job_files import check_ours, write_private
from unisono.processes import process_start

MARK = ".temporary"
"""File in a temporary directory: the process with which it ends, or `KEPT`."""
KEPT = "kept"
"""Content of the mark of a directory that a failed run has left for its user to look at."""
KEEP_S = 7 * 24 * 3600.0
"""How long such a directory stays."""
KEEP_COUNT = 20
"""Number of them that stay, the latest ones."""
_GIVE_UP_S = 2.0


def end_processes_of(run_id: str, rank: str) -> None:
    """Kill all processes that this rank of this run started, directly or not."""
    marks = {f"UNISONO_RUN_ID={run_id}".encode(), f"RANK={rank}".encode()}
    end = time.monotonic() + _GIVE_UP_S
    is_any_left = True
    while is_any_left and time.monotonic() < end:
        is_any_left = False
        for pid in all_processes():
            with suppress(OSError):  # gone, or another user's
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if marks <= set(variables) and pid != os.getpid():
                    is_any_left = True
                    os.kill(pid, signal.SIGKILL)
        if is_any_left:
            time.sleep(0.005)


def end_group(leader: int, members: Callable[[], Iterable[int]], linger_s: float = 0.0) -> None:
    """End the process group of a process that has ended but was not collected.

    A resource tracker removes shared memory once the other processes have ended; it gets the time
    for that.

    Args:
        leader: the process.
        members: returns processes that may be in the group.
        linger_s: how long all may go on.
    """
    begin = time.monotonic()
    while (elapsed_s := time.monotonic() - begin) < linger_s + _GIVE_UP_S:
        is_any_left = False
        for pid in members():
            with suppress(OSError):
                if pid != leader and os.getpgid(pid) == leader and process_start(pid) is not None:
                    is_any_left = True
                    if elapsed_s >= linger_s and not _is_tracker(pid):
                        os.kill(pid, signal.SIGKILL)
        if not is_any_left:
            break
        time.sleep(0.002)
    # The id of a zombie is not reused: the group is still ours.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def all_processes() -> list[int]:
    """Return the ids of all processes of this host; none without /proc."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


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
    """Make a private directory for this launcher; remove those of launchers that were killed."""
    remove_left_directories(parent)
    path = Path(tempfile.mkdtemp(prefix="unisono-", dir=parent))
    owner = f"{os.getpid()} {process_start(os.getpid())} {socket.gethostname()}"
    write_private(path / MARK, owner.encode())
    return path


def keep_directory(path: Path) -> None:
    """Mark a temporary directory as one to keep for some days."""
    try:
        write_private(path / MARK, KEPT.encode())
    except OSError:  # a full disk: it stays, without an end
        (path / MARK).unlink(missing_ok=True)


def remove_left_directories(parent: Path | None) -> None:
    """Remove temporary directories of launchers of this host that were killed.

    Also directories of failed runs that are older than `KEEP_S`, and all but the latest
    `KEEP_COUNT` of them. Only private directories with a private mark of this user are touched.
    """
    kept: list[tuple[float, Path]] = []
    for mark in (parent or Path(tempfile.gettempdir())).glob(f"unisono-*/{MARK}"):
        with suppress(OSError, ValueError):  # another user's, or being removed
            check_ours(mark.parent)
            check_ours(mark)
            if (text := mark.read_text()) == KEPT:
                kept.append((mark.lstat().st_mtime, mark.parent))
                continue
            pid, start, host = text.split()
            if host == socket.gethostname() and str(process_start(int(pid))) != start:
                shutil.rmtree(mark.parent, ignore_errors=True)
    kept.sort(reverse=True)
    for place, (at, path) in enumerate(kept):
        if place >= KEEP_COUNT or time.time() - at > KEEP_S:
            shutil.rmtree(path, ignore_errors=True)

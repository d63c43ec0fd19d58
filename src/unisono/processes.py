"""Which processes of this host live, by process id and start time.

A process that has ended but was not yet collected by its parent (a zombie) counts as dead.
"""

from __future__ import annotations

import os
import select
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks, None if there is no such live process.

    Together with the process id it names a process for ever: ids are reused, pairs are not.
    """
    try:
        fields = _stat(pid)
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_stopped(pid: int, *, or_traced: bool = True) -> bool:
    """Whether a signal or a debugger has stopped a process; False where that cannot be seen.

    Without `or_traced` only a signal counts.
    """
    try:
        return _stat(pid)[0] in ("Tt" if or_traced else "T")
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[str]:
    """Return the fields that the system has for a process, from its state on."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()  # the name before it may hold anything


def pid_namespace() -> int:
    """Return a number that processes share which see each other's process ids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def is_dead(pid: int, started: int) -> bool:
    """Whether the process that had this id and start time has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # an old kernel, a strict sandbox, another system
        return _is_dead_by_proc(pid, started)
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)  # readable as soon as the process has ended
        if poller.poll(0):
            return True
    finally:
        os.close(fd)
    return _is_dead_by_proc(pid, started)


def _is_dead_by_proc(pid: int, started: int) -> bool:
    if Path("/proc/self/stat").exists():
        return process_start(pid) != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False

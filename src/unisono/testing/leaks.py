"""What a process holds (environment, threads, children, files, ...), and what is new in it later.

Used in the test process around plain tests and in each rank around a ranks test. Things that
libraries keep for the life of a process on purpose do not count.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.launch.pool.cleanup import MARK

KINDS = ("environment", "threads", "processes", "files", "shared memory", "temporary", "groups")
"""Kinds of things that are watched."""

HOST_KINDS = ("shared memory", "temporary")
"""Kinds that belong to the host and not to one process."""

PREFIXES = ("unisono",)
"""Starts of names of our own temporary files and directories."""

_SHM = Path("/dev/shm")
_PROC = Path("/proc/self/fd")
_ENDED = "ended, but not waited for"
_LASTING_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_")
_LASTING_THREADS = ("TMonitor", "pytest_timeout")
_LASTING_COMMANDS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "unisono.launch.pool.server",
)


@dataclass(frozen=True)
class Holdings:
    """The things of one process at one time: kind -> key -> description."""

    entries: dict[str, dict[str, str]]

    @classmethod
    def now(cls, kinds: Collection[str] = KINDS) -> Holdings:
        """Look at this process."""
        return cls({kind: _LOOK[kind]() for kind in kinds})

    def new(self, *, ignore: Collection[str] = (), patience_s: float = 0.5) -> dict[str, list[str]]:
        """Return what is there now and was not then, by kind.

        Args:
            ignore: keys that do not count (`"pid:12"`, `"fd:5"`, names of files).
            patience_s: how long things that end by themselves may take to do so.
        """
        deadline = time.monotonic() + patience_s
        pause_s = 0.001
        leaks = self._difference(ignore)
        if leaks:
            gc.collect()  # it takes longer than all the looks
        while set(leaks) - {"environment"} and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            leaks = self._difference(ignore)
        if leaks:
            gc.collect()
        return leaks and self._difference(ignore)

    def _difference(self, ignore: Collection[str]) -> dict[str, list[str]]:
        leaks: dict[str, list[str]] = {}
        for kind, before in self.entries.items():
            after = _LOOK[kind]()
            texts = [
                text
                for key, text in after.items()
                if key not in ignore and _is_new(kind, text, before.get(key))
            ]
            if kind == "environment":
                texts += [f"{key} (removed)" for key in before if key not in after]
            if kind in HOST_KINDS:
                texts = [text for text in texts if not _belongs_to_another(text)]
            if texts:
                leaks[kind] = sorted(texts)
        return leaks


def _is_new(kind: str, text: str, before: str | None) -> bool:
    """Whether a thing is another than `before`; a child that has ended since is still the same."""
    return before is None or (before != text and not (kind == "processes" and _ENDED in text))


def describe(leaks: dict[str, list[str]]) -> str:
    """Write leaks as text, one kind a line."""
    return "\n".join(f"  {kind}: {', '.join(items)}" for kind, items in leaks.items())


def _environment() -> dict[str, str]:
    return {k: f"{k}={v}" for k, v in os.environ.items() if not k.startswith(_LASTING_VARIABLES)}


def _threads() -> dict[str, str]:
    return {
        f"thread:{id(t)}": f"{t.name}{' (daemon)' if t.daemon else ''}"
        for t in threading.enumerate()
        if type(t).__name__ not in _LASTING_THREADS and not t.name.startswith(_LASTING_THREADS)
    }


def _processes() -> dict[str, str]:
    if not _PROC.exists():
        return {f"pid:{p.pid}": f"{p.pid} {p.name}" for p in multiprocessing.active_children()}
    if (server := _warm_server()) is not None:
        _ = server.is_alive  # collects one that has left, idle; else the next run would do so
    entries: dict[str, str] = {}
    for pid in _children():
        command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        if not any(word in command for word in _LASTING_COMMANDS):
            entries[f"pid:{pid}"] = f"{pid} ({command[:80] or _ENDED})"
    return entries


def _warm_server() -> Any:
    """The server of `unisono.run` in this process, if it has one."""
    return getattr(sys.modules.get("unisono.launch.pool.client"), "_server", None)


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in lists for pid in _read(path).split()]


def _parents() -> dict[int, int]:
    """The parent of every process, as far as /proc tells."""
    stats = {int(p.name): _read(p / "stat").rpartition(")")[2].split() for p in _numbered("/proc")}
    return {pid: int(words[1]) for pid, words in stats.items() if len(words) > 1}


def _files() -> dict[str, str]:
    lasting = _lasting_fds()
    entries: dict[str, str] = {}
    for entry in _numbered(_PROC):
        with suppress(OSError):  # the descriptor of this very listing
            if int(entry.name) not in lasting:
                entries[f"fd:{entry.name}"] = f"fd {entry.name} -> {entry.readlink()}"
    return entries


def _lasting_fds() -> set[int]:
    tracker, forkserver = (
        getattr(sys.modules.get(f"multiprocessing.{name}"), f"_{name}", None)
        for name in ("resource_tracker", "forkserver")
    )
    server = _warm_server()
    fds = [getattr(tracker, "_fd", None), getattr(forkserver, "_forkserver_alive_fd", None)]
    fds += () if server is None else server.fds
    return {fd for fd in fds if fd is not None}


def _own_entries(directory: Path, prefixes: str | tuple[str, ...]) -> dict[str, str]:
    """Return the entries of this user; what vanishes meanwhile is left out."""
    paths: dict[str, str] = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                is_own = entry.stat(follow_symlinks=False).st_uid == os.getuid()
                if is_own and entry.name.startswith(prefixes):
                    paths[entry.name] = entry.path
    return paths


def _belongs_to_another(path: str) -> bool:
    """Whether another test session on this host, and not this one, made the file `path`.

    Names or marks of ours tell the pid of their maker; what has neither is another's if a process
    outside this one's family has it mapped, or names it in its command.
    """
    if Path(path).name.startswith("mpich_shm_") and "PYTEST_XDIST_WORKER" in os.environ:
        return True  # MPICH's files name no maker, and stay for a moment after killed ranks
    family = _family()
    owner = _read(Path(path, MARK)).partition(" ")[0]
    if owner and Path("/proc", owner).exists():
        return int(owner) not in family
    for number in re.findall(r"(?<![0-9A-Za-z])[0-9]{2,7}(?![0-9A-Za-z])", Path(path).name):
        if Path("/proc", number).exists() and int(number) not in family:
            return True
    others = [entry for entry in _numbered("/proc") if int(entry.name) not in family]
    return any(path in _read(process / name) for process in others for name in ("maps", "cmdline"))


def _family() -> set[int]:
    """This process and all it started, as far as /proc tells."""
    parents, family = _parents(), {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _groups() -> dict[str, str]:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return {}
    return {"group": f"default process group ({dist.get_backend()})"}


def _numbered(directory: str | Path) -> Iterable[Path]:
    try:
        return [entry for entry in Path(directory).iterdir() if entry.name.isdigit()]
    except OSError:
        return []


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


_LOOK = {
    "environment": _environment,
    "threads": _threads,
    "processes": _processes,
    "files": _files,
    "shared memory": lambda: _own_entries(_SHM, ""),
    "temporary": lambda: _own_entries(Path(tempfile.gettempdir()), PREFIXES),
    "groups": _groups,
}

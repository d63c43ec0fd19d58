"""A job's directory on hosts that share no file system: each side sends what it has written.

`Mirror` is one side of a directory that is kept twice. `Host` is what stands for the launcher on
another host: its copy, and the agents of its ranks. `follow_all` is the launcher's side of all
hosts. How messages get there is a `Link`, of which ssh has one for each host and Ray one for each
rank; a host that falls silent is lost, and a host that hears nothing ends its ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.logs import RankLog, tail
from unisono.launch.places import mailbox
from unisono.launch.places.mailbox import PAYLOAD, Orders
from unisono.launch.pool import cleanup
from unisono.launch.pool.protocol import Failed, RankState, replace_search_path

CHUNK = 4 << 20
"""Most bytes of growing files in one message."""
SILENT_S = 10.0
"""A side that has heard nothing for so long gives the other up."""
REFUSED = "refused"
"""Is there if the ranks were not started, with the reason."""
NOTICE = "notice"
"""One line that the user should see while ranks are being started."""
_FORWARDED = ("UNISONO_", "PYTHON", "TORCH", "OMP_", "MKL_", "GLOO_", "NCCL_", "COLUMNS", "LINES")
"""Starts of names of variables that ranks of other hosts get as well."""
_OF_THIS_HOST = ("PYTHONPATH", "PYTHONHOME", "UNISONO_HOST_ID", "UNISONO_JOB_DIR")
_GROWING = re.compile(r"rank-\d+\.(log|stack|result)")
_REPLACED = re.compile(r"rank-\d+\.state\.json|rendezvous-\d+\.json")


class Lost(Exception):
    """A host, or who stands for a rank there, is gone. Says what is known of it."""


class Change(NamedTuple):
    """What one side has written to a file."""

    name: str
    data: bytes
    offset: int = 0
    """Where it begins, in a file that grows."""


class Mirror:
    """One side of a directory that is kept twice.

    Logs, stacks, results and the payload grow, and travel in pieces; small files are replaced. What
    a small file tells of is there before it: it is read first, and written last. Orders are lines
    that both sides add, and each side passes on what it did not get from the other.
    """

    def __init__(self, directory: Path, attempt: int, *, is_host: bool) -> None:
        self._dir = directory
        self._is_host = is_host
        self._meeting = f"rendezvous-{attempt}.json"
        self._orders = Orders(directory, attempt)
        self._orders_name = f"orders-{attempt}"
        self._sent: dict[str, tuple[int, int]] = {}  # inode, bytes
        self._stamps: dict[str, tuple[int, int]] = {}
        self._known: dict[str, bytes] = {}
        self._from_other: Counter[str] = Counter()
        self._logs: dict[str, RankLog] = {}
        self.has_more = False
        """Whether the last changes were not all."""

    def changes(self) -> list[Change]:
        """Return what this side has written since the last call."""
        replaced = list(self._replaced())
        found = list(self._grown())
        for order in self._orders.new():
            text = json.dumps(order)
            if self._from_other[text]:
                self._from_other[text] -= 1
            else:
                found.append(Change(self._orders_name, text.encode()))
        if not self.has_more:
            for change, stamp in replaced:
                self._stamps[change.name], self._known[change.name] = stamp, change.data
                found.append(change)
        return found

    def apply(self, changes: Sequence[Change]) -> None:
        """Write what the other side has written."""
        for change in changes:
            path = self._dir / change.name
            if change.name == self._orders_name:
                order = json.loads(change.data)
                self._from_other[json.dumps(order)] += 1
                self._orders.give(**order)
            elif not self._is_expected(change.name):
                raise Lost(f"was lost: it sent {change.name!r}, which is not a file of a job")
            elif path.suffix == ".log":
                if change.name not in self._logs:
                    self._logs[change.name] = RankLog(path)
                self._logs[change.name].write(change.data)
            elif path.suffix == ".json":
                self._known[change.name] = change.data
                job_files.write_private(path, change.data)
            else:
                _write_at(path, change.data, change.offset)

    def close(self) -> None:
        """Let go of all files."""
        for log in self._logs.values():
            log.close()

    def _is_expected(self, name: str) -> bool:
        if self._is_host:
            return name in (PAYLOAD, job_files.STATE, self._meeting)
        return bool(_GROWING.fullmatch(name)) or bool(_REPLACED.fullmatch(name))

    def _names(self, pattern: re.Pattern[str], of_launcher: Sequence[str]) -> Sequence[str]:
        if not self._is_host:  # that directory may be large, and be looked at by many
            return of_launcher
        return sorted(
            entry.name for entry in os.scandir(self._dir) if pattern.fullmatch(entry.name)
        )

    def _replaced(self) -> Iterator[tuple[Change, tuple[int, int]]]:
        for name in self._names(_REPLACED, (self._meeting, job_files.STATE)):
            with suppress(OSError):
                found = (self._dir / name).stat()
                stamp = found.st_ino, found.st_mtime_ns
                if self._stamps.get(name) != stamp:
                    data = (self._dir / name).read_bytes()
                    if self._known.get(name) != data:
                        yield Change(name, data), stamp

    def _grown(self) -> Iterator[Change]:
        room, self.has_more = CHUNK, False
        for name in self._names(_GROWING, (PAYLOAD,)):
            path = self._dir / name
            with suppress(OSError), path.open("rb") as file:
                found = os.fstat(file.fileno())
                inode, sent = found.st_ino, 0
                if name in self._sent:
                    before, sent = self._sent[name]
                    if before != inode:  # a new log has begun
                        rest = path.with_name(f"{name}.old").read_bytes()[sent:]
                        if rest:
                            yield Change(name, rest)
                        sent = 0
                file.seek(sent)
                if data := file.read(room):
                    yield Change(name, data, sent)
                    room -= len(data)
                self._sent[name] = inode, sent + len(data)
                self.has_more |= found.st_size > sent + len(data)


def _write_at(path: Path, data: bytes, offset: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if offset else os.O_TRUNC)
    fd = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
    finally:
        os.close(fd)


class Host:
    """What stands for the launcher on another host: a copy of the job's directory, and agents.

    Lives in a process there that has the launcher's word: at the other end of ssh, in an actor of
    Ray. When that process goes, the agents end their ranks.
    """

    def __init__(self, attempt: int, places: Sequence[Mapping[str, Any]], cwd: str) -> None:
        """Prepare for ranks; their agents start as soon as the job has come.

        Args:
            attempt: number of the attempt.
            places: of each rank the fields of its `Environment`, and the host's `name`.
            cwd: working directory of the launcher; taken if it is here, too.
        """
        self._attempt = attempt
        self._places = places
        self._cwd = cwd if Path(cwd).is_dir() else None
        self._dir = cleanup.make_temporary_directory(None)
        self._orders = Orders(self._dir, attempt)
        self._orders.open()
        self._mirror = Mirror(self._dir, attempt, is_host=True)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._grace_s = 1.0

    def exchange(self, changes: Sequence[Change]) -> tuple[list[Change], bool]:
        """Take what the launcher has written; return the same of this side, and if it is all."""
        self._mirror.apply(changes)
        if not self._agents and (self._dir / job_files.STATE).exists():
            self._start()
        has_ended = bool(self._agents) and all(a.poll() is not None for a in self._agents.values())
        if has_ended:
            self._report_silent()
        found = self._mirror.changes()
        return found, has_ended and not self._mirror.has_more

    def close(self) -> None:
        """End what still runs, and remove the copy."""
        running = [agent for agent in self._agents.values() if agent.poll() is None]
        if running:
            with suppress(OSError):
                self._orders.give(stop="the launcher is gone")
        end = time.monotonic() + self._grace_s + 3.0
        for agent in running:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, end - time.monotonic()))
            agent.kill()  # its rank ends with it
            agent.wait()
        self._mirror.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _start(self) -> None:
        entry = job_files.read_state(self._dir)
        me = os.getpid()
        entry["plan"]["launcher"] = (socket.gethostname(), me, job_files.process_start(me) or 0)
        self._grace_s = entry["plan"]["grace_s"]
        job_files.write_state(self._dir, entry)
        here = [path for path in entry["search_path"] if Path(path).exists()]
        replace_search_path(self._dir / PAYLOAD, list(dict.fromkeys([*here, *sys.path])))
        words = [sys.executable, "-P", "-m", "unisono.launch.places.agent", str(self._dir)]
        for place in self._places:
            with (self._dir / f"agent-{place['rank']}.log").open("wb") as output:
                self._agents[place["rank"]] = subprocess.Popen(
                    [*words, str(self._attempt), json.dumps(place)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._cwd,
                    start_new_session=True,
                )

    def _report_silent(self) -> None:
        """Report the ranks whose agents have ended without a word."""
        for rank, agent in self._agents.items():
            state = mailbox.read_state(self._dir, rank, self._attempt)
            if state is None or not state.is_over:
                name = next(p["name"] for p in self._places if p["rank"] == rank)
                words = tail(self._dir / f"agent-{rank}.log").strip().splitlines() or ["no word"]
                what = f"was lost: its agent ended with code {agent.returncode}: {words[-1]}"
                report_lost(self._dir, self._attempt, (rank,), name, what, "the same environment")


def report_lost(
    directory: Path, attempt: int, ranks: Sequence[int], host: str, what: str, hint: str
) -> None:
    """Say that ranks are gone that cannot say so themselves, unless they have come to an end."""
    for rank in ranks:
        state = mailbox.read_state(directory, rank, attempt)
        state = state or RankState(rank=rank, attempt=attempt, host=host, node=host)
        if not state.is_over:
            failed = Failed(
                summary=what, traceback=what, pickled=None, is_consequence=False, lost=hint
            )
            state.take({"state": "failed", "failed": failed})
            mailbox.write_state(directory, state)


def job_entry(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what hosts need to know of the launcher besides the plan."""
    paths = sysconfig.get_paths()
    own = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # A host has a Python of its own, perhaps at another place; the user's directories go along.
    search_path = [
        entry
        for entry in sys.path
        if not entry.endswith(".zip") and not any(Path(entry).is_relative_to(p) for p in own)
    ]
    cwd = ""
    with suppress(OSError):
        cwd = str(Path.cwd())
    return {"search_path": search_path, "cwd": cwd, "variables": forwarded(environment)}


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks of other hosts get from the launcher."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED) and name not in _OF_THIS_HOST
    }


class Link(Protocol):
    """A way to the `Host` of some ranks."""

    host: str
    """Its name."""
    ranks: Sequence[int]
    """Who runs there."""
    hint: str
    """What to try if it is lost."""
    has_answered: bool
    """Whether that host has said anything yet."""

    def exchange(self, changes: Sequence[Change]) -> tuple[list[Change], bool]:
        """See `Host.exchange`. Raises `Lost`."""
        ...

    def abort(self) -> None:
        """Have `exchange` raise, from another thread: nobody waits any more."""
        ...

    def close(self) -> None:
        """Have the host end what it has, and let it go."""
        ...


def follow_all(directory: Path, attempt: int, links: Sequence[Link]) -> None:
    """Keep the copies of all hosts and the job's directory alike until all hosts have ended.

    Also ends when this process is told to, or when who started it has gone.
    """
    size, launcher = sum(len(link.ranks) for link in links), os.getppid()
    stop, late = threading.Event(), threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)

    def follow(link: Link) -> None:
        mirror = Mirror(directory, attempt, is_host=False)
        began = time.monotonic()
        try:
            is_over = False
            while not is_over and not stop.is_set():
                changes, is_over = link.exchange(mirror.changes())
                mirror.apply(changes)
                if not mirror.has_more and sum(len(c.data) for c in changes) < CHUNK:
                    stop.wait(0 if is_over else mailbox.pause_s(time.monotonic() - began, size))
        except Exception as error:
            if late.is_set() and not link.has_answered:
                for rank in link.ranks:
                    state = RankState(rank=rank, attempt=attempt, host=link.host, state="stopped")
                    mailbox.write_state(directory, state)
                return
            kind = "" if isinstance(error, Lost) else f"was lost: {type(error).__name__}: "
            report_lost(directory, attempt, link.ranks, link.host, f"{kind}{error}", link.hint)
        finally:
            mirror.close()
            link.close()

    threads = [threading.Thread(target=follow, args=(link,), daemon=True) for link in links]
    for thread in threads:
        thread.start()
    orders = Orders(directory, attempt)
    while any(thread.is_alive() for thread in threads):
        if os.getppid() != launcher:
            stop.set()
        if any("stop" in order or "interrupt" in order for order in orders.new()):
            late.set()
            for link in links:
                if not link.has_answered:
                    link.abort()
        time.sleep(0.02)


def refuse(directory: Path, error: PlatformError) -> None:
    """Leave the reason why no rank was started."""
    job_files.write_private(directory / REFUSED, str(error).encode())

"""A job's directory on hosts that share no file system: each side sends what it has written.

`Mirror` is one side of a directory that is kept twice. `Host` is what stands for the launcher on
another host: its copy, and the agents of its ranks. `follow_all` is the launcher's side of all
hosts. How messages get there is a `Link`, of which ssh has one for each host and Ray one for each
rank; a host that falls silent is lost, and a host that hears nothing ends its ranks. A program of
ours has the links (`ssh.py`, `ray.py`); the launcher starts it as it does `mpiexec` (`on_copies`).
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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from unisono.launch import job_files
from unisono.launch.logs import LogReader, RankLog, tail
from unisono.launch.places.mailbox import PAYLOAD, Mailbox, Plan, pause_s
from unisono.launch.places.program import LaunchedRanks
from unisono.launch.pool import cleanup
from unisono.launch.pool.protocol import Job, RankState, replace_search_path
from unisono.processes import process_start

CHUNK = 4 << 20
"""Most bytes of growing files in one message."""
SILENT_S = 10.0
"""A side that has heard nothing for so long gives the other up."""
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
        self._mail = Mailbox(directory, attempt)
        self._orders_name = f"orders-{attempt}"
        self._growing: dict[str, LogReader] = {}
        self._known: dict[str, bytes] = {}
        self._from_other: Counter[str] = Counter()
        self._logs: dict[str, RankLog] = {}
        self.has_more = False
        """Whether the last changes were not all."""

    def changes(self) -> list[Change]:
        """Return what this side has written since the last call."""
        replaced = list(self._replaced())  # before what they tell of, which must not be missed
        found = list(self._grown())
        for order in self._mail.new_orders():
            text = json.dumps(order)
            if self._from_other[text]:
                self._from_other[text] -= 1
            else:
                found.append(Change(self._orders_name, text.encode()))
        if not self.has_more:
            self._known |= {change.name: change.data for change in replaced}
            found += replaced
        return found

    def apply(self, changes: Sequence[Change]) -> None:
        """Write what the other side has written."""
        for change in changes:
            path = self._dir / change.name
            if change.name == self._orders_name:
                order = json.loads(change.data)
                self._from_other[json.dumps(order)] += 1
                self._mail.order(**order)
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
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
                flags |= 0 if change.offset else os.O_TRUNC
                with open(os.open(path, flags, 0o600), "wb") as file:  # noqa: PTH123
                    file.seek(change.offset)
                    file.write(change.data)

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

    def _replaced(self) -> Iterator[Change]:
        for name in self._names(_REPLACED, (self._meeting, job_files.STATE)):
            with suppress(FileNotFoundError):
                data = (self._dir / name).read_bytes()
                if self._known.get(name) != data:
                    yield Change(name, data)

    def _grown(self) -> Iterator[Change]:
        room, self.has_more = CHUNK, False
        for name in self._names(_GROWING, (PAYLOAD,)):
            file = self._growing.setdefault(name, LogReader(self._dir / name))
            for data in file.new():
                yield Change(name, data, file.place - len(data))
                room -= len(data)
                if room <= 0:
                    self.has_more = True
                    return


def places_of(nodes: Sequence[str], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what agents are told of their ranks: fields of an `Environment`, and the `name`.

    Args:
        nodes: that of each rank; ranks of a node are neighbours.
        names: of the nodes, as users know them.
    """
    order = list(dict.fromkeys(nodes))
    return [
        {
            "rank": rank,
            "size": len(nodes),
            "local_rank": rank - nodes.index(node),
            "local_size": nodes.count(node),
            "node": order.index(node),
            "nodes": len(order),
            "name": names[node],
        }
        for rank, node in enumerate(nodes)
    ]


class Host:
    """What stands for the launcher on another host: a copy of the job's directory, and agents.

    Lives in a process there that has the launcher's word: at the other end of ssh, in an actor of
    Ray. When that process goes, the agents end their ranks.
    """

    def __init__(self, attempt: int, places: Sequence[Mapping[str, Any]], cwd: str) -> None:
        """Prepare for ranks; their agents start as soon as the job has come.

        Args:
            attempt: number of the attempt.
            places: of its ranks, see `places_of`.
            cwd: working directory of the launcher; taken if it is here, too.
        """
        self._attempt = attempt
        self._places = places
        self._cwd = cwd if Path(cwd).is_dir() else None
        self._dir = cleanup.make_temporary_directory(None)
        self._mail = Mailbox(self._dir, attempt)
        self._mail.open()
        self._mirror = Mirror(self._dir, attempt, is_host=True)
        self._agents: list[subprocess.Popen[bytes]] = []
        self._grace_s = 1.0

    def exchange(self, changes: Sequence[Change]) -> tuple[list[Change], bool]:
        """Take what the launcher has written; return the same of this side, and if it is all."""
        self._mirror.apply(changes)
        if not self._agents and (self._dir / job_files.STATE).exists():
            self._start()
        has_ended = bool(self._agents) and all(agent.poll() is not None for agent in self._agents)
        if has_ended:
            self._report_silent()
        found = self._mirror.changes()
        return found, has_ended and not self._mirror.has_more

    def close(self) -> None:
        """End what still runs, and remove the copy."""
        running = [agent for agent in self._agents if agent.poll() is None]
        if running:
            with suppress(OSError):
                self._mail.order(stop="the launcher is gone")
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
        entry["plan"]["launcher"] = (socket.gethostname(), me, process_start(me) or 0)
        self._grace_s = entry["plan"]["grace_s"]
        job_files.write_state(self._dir, entry)
        here = [path for path in entry["search_path"] if Path(path).exists()]
        replace_search_path(self._dir / PAYLOAD, list(dict.fromkeys([*here, *sys.path])))
        words = [sys.executable, "-P", "-m", "unisono.launch.places.agent", str(self._dir)]
        for place in self._places:
            with (self._dir / f"agent-{place['rank']}.log").open("wb") as output:
                agent = subprocess.Popen(
                    [*words, str(self._attempt), json.dumps(place)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._cwd,
                    start_new_session=True,
                )
            self._agents.append(agent)

    def _report_silent(self) -> None:
        """Report the ranks whose agents have ended without a word."""
        for place, agent in zip(self._places, self._agents, strict=True):
            log = tail(self._dir / f"agent-{place['rank']}.log").strip()
            words = log.splitlines() or ["no word"]
            what = f"was lost: its agent ended with code {agent.returncode}: {words[-1]}"
            report_lost(self._mail, [place["rank"]], place["name"], what, "the same environment")


def report_lost(mail: Mailbox, ranks: Sequence[int], host: str, what: str, hint: str) -> None:
    """Say that ranks are gone that cannot say so themselves, unless they have come to an end."""
    for rank in ranks:
        state = mail.read_state(rank)
        state = state or RankState(rank=rank, attempt=mail.attempt, host=host, node=host)
        if not state.is_over:
            mail.write_failure(state, summary=what, traceback=what, lost=hint)


def on_copies(
    job: Job, plan: Plan, attempt: int, entry: Mapping[str, Any], **shown: Any
) -> LaunchedRanks:
    """Return ranks on hosts that need share no directory, started by our own program there.

    `entry` is what the program has to know, beside the plan, in `job.json`. The variables of this
    process stay here, but for those that are meant for ranks.
    """
    paths = sysconfig.get_paths()
    own = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    # A host has a Python of its own, perhaps at another place; the user's directories go along.
    search_path = [
        entry
        for entry in sys.path
        if not entry.endswith(".zip") and not any(Path(entry).is_relative_to(p) for p in own)
    ]
    environment, place = job.setting.environment, job.platform.kind.value
    variables = {**forwarded(environment), **(job.platform.env or {})}
    told = {"search_path": search_path, "cwd": job.setting.directory or "", place: dict(entry)}
    return LaunchedRanks(
        replace(
            job,
            setting=replace(job.setting, environment={}),
            platform=job.platform.but(env=variables),
        ),
        replace(plan, env=variables),
        attempt,
        [sys.executable, "-P", "-m", f"unisono.launch.places.{place}"],
        env=environment,
        entry=told,
        **shown,
    )


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks of other hosts get from the launcher."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED) and name not in _OF_THIS_HOST
    }


class Link(ABC):
    """A way to the `Host` of some ranks.

    Args:
        places: of these ranks, see `places_of`.
        start_timeout_s: how long the first answer may take.

    Attributes:
        host: its name.
        ranks: who runs there.
        limit_s: how long the next answer may take.
        has_answered: whether that host has said anything yet.
    """

    hint: str
    """What to try if it is lost."""

    def __init__(self, places: Sequence[Mapping[str, Any]], start_timeout_s: float) -> None:
        self.host = str(places[0]["name"])
        self.ranks = [int(place["rank"]) for place in places]
        self.limit_s = start_timeout_s
        self.has_answered = False

    @abstractmethod
    def exchange(self, changes: Sequence[Change]) -> tuple[list[Change], bool]:
        """See `Host.exchange`. Raises `Lost`."""

    @abstractmethod
    def abort(self) -> None:
        """Have `exchange` raise, from another thread: nobody waits any more."""

    @abstractmethod
    def close(self) -> None:
        """Have the host end what it has, and let it go."""


def follow_all(directory: Path, attempt: int, links: Sequence[Link]) -> None:
    """Keep the copies of all hosts and the job's directory alike until all hosts have ended.

    Also ends when this process is told to, or when who started it has gone.
    """
    mail = Mailbox(directory, attempt)
    size, launcher = sum(len(link.ranks) for link in links), os.getppid()
    stop, late = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def follow(link: Link) -> None:
        mirror = Mirror(directory, attempt, is_host=False)
        began = time.monotonic()
        try:
            is_over = False
            while not is_over and not stop.is_set():
                changes, is_over = link.exchange(mirror.changes())
                mirror.apply(changes)
                if not mirror.has_more and sum(len(c.data) for c in changes) < CHUNK:
                    stop.wait(0 if is_over else pause_s(time.monotonic() - began, size))
        except Exception as error:
            if late.is_set() and not link.has_answered:
                for rank in link.ranks:
                    state = RankState(rank=rank, attempt=attempt, host=link.host, state="stopped")
                    mail.write_state(state)
                return
            kind = "" if isinstance(error, Lost) else f"was lost: {type(error).__name__}: "
            report_lost(mail, link.ranks, link.host, f"{kind}{error}", link.hint)
        finally:
            mirror.close()
            link.close()

    threads = [threading.Thread(target=follow, args=(link,), daemon=True) for link in links]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if os.getppid() != launcher:
            stop.set()
        if any("stop" in order or "interrupt" in order for order in mail.new_orders()):
            late.set()
            for link in links:
                if not link.has_answered:
                    link.abort()
        time.sleep(0.02)

"""Record of every collective: what, how many bytes, how long, how much of it waiting, from where.

Off, it costs one `is None` test per call. `with trace() as t:` records; `t.table()` sums up,
`t.save(path)` brings the events of all ranks together on one clock, in a file that chrome://tracing
and Perfetto show, one lane per rank.

What averaging gradients has cost is counted here, too: each wrapper adds to its `AveragingCosts`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from unisono.comm.call import Call
from unisono.comm.health.watchdog import standing
from unisono.environment import detect
from unisono.errors import UnisonoError, explain
from unisono.torch_private import default_store
from unisono.trace_file import table, write

MAX_EVENTS = 100_000
"""Events kept; older ones are dropped first."""


_OF_CALL = (
    *("op", "algorithm", "group", "number", "sent", "received"),
    *("t_start", "wait_ns", "is_async"),
)
"""Fields of an event that are those of its call."""


@dataclass(frozen=True, slots=True)
class Event:
    """One collective on one rank. Times are nanoseconds of `time.perf_counter_ns`."""

    op: str
    algorithm: str
    group: str
    rank: int
    number: int
    sent: int
    received: int
    dtype: str
    t_start: int
    t_end: int
    wait_ns: int
    is_async: bool
    site: str


class Recorder:
    """Collects events of this process."""

    def __init__(self) -> None:
        self._raw: deque[tuple[Call, int, int]] = deque(maxlen=MAX_EVENTS)

    def add(self, call: Call, rank: int) -> None:
        """Take down a call that has just ended."""
        self._raw.append((call, rank, time.perf_counter_ns()))

    @property
    def events(self) -> list[Event]:
        """What was recorded so far, oldest first."""
        return [
            Event(
                rank=rank,
                dtype=str(call.dtype).removeprefix("torch."),
                t_end=t_end,
                site=call._site or "",
                **{name: getattr(call, name) for name in _OF_CALL},
            )
            for call, rank, t_end in list(self._raw)
        ]


recorder: Recorder | None = None
"""The recorder in use; None when nothing is traced. Read by the verbs at each call."""


class trace:
    """Record the collectives of this process while the context is open.

    Args:
        path: where to save at the end (collective over the world), None to save nothing. A place
            that cannot be written is refused when the context is entered.

    >>> with trace() as t:
    ...     pass
    >>> t.events
    []
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._recorder = Recorder()
        self._before: Recorder | None = None

    @property
    def events(self) -> list[Event]:
        """Events of this rank."""
        return self._recorder.events

    def table(self) -> str:
        """Return the sums per operation and source line of this rank, largest first."""
        return table([asdict(e) for e in self.events])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Gather the events of all ranks on rank 0, which writes `path`. Collective."""
        _refuse(path, _gather_and_write(path, self.events))

    def __enter__(self) -> trace:
        global recorder
        if self._path is not None:
            environment = detect()
            rank = dist.get_rank() if dist.is_initialized() else environment.rank
            if rank == 0 or environment.nodes == 1:  # else this host need not have the folder
                _refuse(self._path, _obstacle(self._path))
        self._before, recorder = recorder, self._recorder
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global recorder
        recorder = self._before
        if self._path is not None and kind is None:
            self.save(self._path)


_whole_run: trace | None = None


def start_from_environment() -> None:
    """Open a trace for the whole run if `UNISONO_TRACE` names a file; it is saved at the end.

    Rank 0 warns where that file cannot be written; the run is worth more than its trace.
    """
    global _whole_run
    path = os.environ.get("UNISONO_TRACE")
    if path and _whole_run is None:
        if detect().rank == 0:
            warn(_not_written(path, _obstacle(path)))
        _whole_run = trace()
        _whole_run.__enter__()
        atexit.register(_save_own_part)


def warn(problem: str) -> None:
    """Warn of a trace that cannot be written, unless there is no problem."""
    if problem:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


def _save_own_part() -> None:
    """At the end of a process whose world was not closed: write this rank's events beside the file.

    Gathering them would need the other ranks, which may be gone.
    """
    warn(_save_whole_run(_write_own_part))


def save_whole_run() -> str:
    """Save the trace of the whole run, if one is open. Collective over the world.

    Returns:
        Why it could not be written, the same on all ranks; empty if it was.
    """
    return _save_whole_run(_gather_and_write)


def _save_whole_run(save: Callable[[str, list[Event]], str]) -> str:
    global _whole_run
    whole, _whole_run = _whole_run, None
    if whole is None:
        return ""
    whole.__exit__(None, None, None)
    path = os.environ.get("UNISONO_TRACE", "trace.json")
    return _not_written(path, save(path, whole.events))


# -- the file: problems are returned as text, "" without one -------------------------------------

_PINGS = 16


def _gather_and_write(path: str | os.PathLike[str], events: list[Event]) -> str:
    """Bring all events to rank 0, which writes; returns what is in the way, the same everywhere."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        # Ranks that have groups, but no world to gather over, write a file each.
        return _write_own_part(path, events) if standing() else _write(path, _plain(events))
    from unisono.comm.communicator import world  # whose verbs are recorded here

    comm, offset = world(), 0
    if detect().nodes > 1:  # ranks of one host share the counter
        store = PrefixStore("unisono/trace", default_store())
        offset = clock_offset_ns(store, comm.rank, comm.size)
    gathered = comm.gather_object(_plain(events, offset))
    problem = None if gathered is None else _write(path, list(itertools.chain(*gathered)))
    return comm.broadcast_object(problem)


def _write_own_part(path: str | os.PathLike[str], events: list[Event]) -> str:
    """Write the events of this rank to `path`, or to `path.rank3` if there are other ranks."""
    ranks = {event.rank for event in events}
    is_alone = not dist.is_initialized() and ranks <= {0} and not standing()
    own_path = path if is_alone else f"{os.fspath(path)}.rank{min(ranks, default=0)}"
    return _write(own_path, _plain(events))


def _plain(events: list[Event], offset: int = 0) -> list[dict[str, Any]]:
    """Return events as they are written, by a clock that is so much ahead."""
    moved = (replace(e, t_start=e.t_start + offset, t_end=e.t_end + offset) for e in events)
    return [asdict(event) for event in moved]


def _write(path: str | os.PathLike[str], events: Sequence[dict[str, Any]]) -> str:
    try:
        write(path, events)
    except OSError as error:
        return _obstacle(path) or error.strerror or str(error)
    return ""


def _obstacle(path: str | os.PathLike[str]) -> str:
    """Return why a file cannot be written to `path`, as far as can be seen without doing it."""
    target = Path(path).absolute()
    if target.is_dir():
        return "this is a folder"
    place = target if target.exists() else target.parent
    return "" if os.access(place, os.W_OK) else f"no folder that can be written: {str(place)!r}"


def _not_written(path: str | os.PathLike[str], problem: str) -> str:
    hint = "a file in a folder that exists and can be written: UNISONO_TRACE=trace.json"
    return problem and explain(f"a trace to {os.fspath(path)!r}", problem, None, hint)


def _refuse(path: str | os.PathLike[str], problem: str) -> None:
    if problem:
        raise UnisonoError(_not_written(path, problem))


def clock_offset_ns(store: PrefixStore, rank: int, size: int) -> int:
    """Return what to add to this rank's clock to get rank 0's: median over some ping-pongs."""
    store = PrefixStore(str((store.add("clock", 1) - 1) // size), store)
    if rank == 0:
        for other in range(1, size):
            for i in range(_PINGS):
                store.wait([f"ping/{other}/{i}"])
                store.set(f"pong/{other}/{i}", str(time.perf_counter_ns()))
        return 0
    offsets: list[float] = []
    for i in range(_PINGS):
        before = time.perf_counter_ns()
        store.set(f"ping/{rank}/{i}", "")
        there = int(store.get(f"pong/{rank}/{i}"))
        offsets.append(there - (before + time.perf_counter_ns()) / 2)
    return round(statistics.median(offsets))


_ADDED_UP = ("steps", "bytes", "wait_backward_s", "wait_forward_s")


@dataclass(eq=False)
class AveragingCosts:
    """Running totals of one module on this rank."""

    module: str
    """Class of the module."""
    ranks: int
    """How many ranks average."""
    buckets: int = 0
    """How many messages a step has."""
    steps: int = 0
    bytes: int = 0
    wait_backward_s: float = 0.0
    wait_forward_s: float = 0.0


all_costs: list[AveragingCosts] = []
"""Those of all modules of this process, oldest first; they outlive their modules."""


class CostLedger:
    """The costs of all modules from its opening on."""

    def __init__(self) -> None:
        self._before = {id(one): replace(one) for one in all_costs}

    def rows(self) -> list[dict[str, Any]]:
        """Return the costs since the opening, one row per module that had any, oldest first."""
        rows: list[dict[str, Any]] = []
        for now in all_costs:
            before = self._before.get(id(now), AveragingCosts(now.module, now.ranks))
            since = {name: getattr(now, name) - getattr(before, name) for name in _ADDED_UP}
            if any(since.values()):
                rows.append(asdict(now) | since)
        return rows

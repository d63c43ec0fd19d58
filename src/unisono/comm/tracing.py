"""Record of every collective: what, how many bytes, how long, how much of it waiting, from where.

Off, it costs one `is None` test a call. `with trace() as t:` records; `t.table()` sums up,
`t.save(path)` writes a file that chrome://tracing and Perfetto show, one lane a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import TracebackType

from unisono.comm.call import Call
from unisono.errors import UnisonoError

MAX_EVENTS = 100_000
"""Events kept; older ones are dropped first."""


@dataclass(frozen=True, slots=True)
class Event:
    """One collective on one rank. Times are nanoseconds of `time.perf_counter_ns`."""

    op: str
    algorithm: str
    group: str
    rank: int
    seq: int
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

    def __init__(self, call_sites: bool = True) -> None:
        self.call_sites = call_sites
        self._raw: deque[tuple[Call, int, int]] = deque(maxlen=MAX_EVENTS)

    def add(self, call: Call, rank: int) -> None:
        """Take down a call that has just ended."""
        self._raw.append((call, rank, time.perf_counter_ns()))

    @property
    def events(self) -> list[Event]:
        """What was recorded so far, oldest first."""
        return [
            Event(
                op=call.op,
                algorithm=call.algorithm,
                group=call.group,
                rank=rank,
                seq=call.seq,
                sent=call.sent,
                received=call.received,
                dtype=str(call.dtype).removeprefix("torch."),
                t_start=call.t_start,
                t_end=t_end,
                wait_ns=call.wait_ns,
                is_async=call.is_async,
                site=call._site or "",
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
        call_sites: look up the source line of each call (about a microsecond).

    >>> with trace() as t:
    ...     pass
    >>> t.events
    []
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, call_sites: bool = True
    ) -> None:
        self._path = path
        self._recorder = Recorder(call_sites)
        self._before: Recorder | None = None

    @property
    def events(self) -> list[Event]:
        """Events of this rank."""
        return self._recorder.events

    def table(self) -> str:
        """Return the sums per operation and source line of this rank, largest first."""
        from unisono.trace_file import table

        return table([asdict(e) for e in self.events])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Gather the events of all ranks on rank 0, which writes `path`. Collective."""
        from unisono.comm.tracing_report import save

        save(path, self.events)

    def __enter__(self) -> trace:
        global recorder
        if self._path is not None:
            from unisono.comm.tracing_report import check_path

            check_path(self._path)
        self._before, recorder = recorder, self._recorder
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
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
        from unisono.comm.tracing_report import check_path
        from unisono.environment import detect

        if detect().rank == 0:
            with warned_of():
                check_path(path)
        _whole_run = trace()
        _whole_run.__enter__()
        atexit.register(_save_own_part)


@contextlib.contextmanager
def warned_of() -> Iterator[None]:
    """Turn the error of a trace that cannot be written into a warning."""
    try:
        yield
    except UnisonoError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def _save_own_part() -> None:
    """At the end of a process whose world was not closed: write this rank's events beside the file.

    Gathering them would need the other ranks, which may be gone.
    """
    global _whole_run
    if _whole_run is not None:
        from unisono.comm.tracing_report import save_alone

        whole, _whole_run = _whole_run, None
        with warned_of():
            save_alone(os.environ.get("UNISONO_TRACE", "trace.json"), whole.events)


def save_whole_run() -> None:
    """Save the trace of the whole run, if one is open. Collective over the world."""
    global _whole_run
    if _whole_run is not None:
        whole, _whole_run = _whole_run, None
        whole.__exit__(None, None, None)
        whole.save(os.environ["UNISONO_TRACE"])

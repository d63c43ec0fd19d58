"""`Run`: the record that one rank keeps of a run. Everything here is local to the rank."""

from __future__ import annotations

import json
import operator
import os
import resource
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.comm.call import Call
from unisono.comm.groups import store_of_world
from unisono.comm.health.trace import CostLedger, Recorder, clock_offset_ns
from unisono.data_parallel.nonblocking import only_observes
from unisono.environment import detect
from unisono.errors import PartitionError, UnisonoError, an
from unisono.launch.context import here
from unisono.topology.decompose import split_cuts
from unisono.train.recording import directory as directories

if TYPE_CHECKING:
    from unisono.topology.fanout import Layout

FLUSH_NS = 200_000_000
"""What was logged is written after so long at the next call."""
KEPT_SPANS = 5_000
LARGEST_STEP = 2**53
"""Beyond it the numbers of a page, which are floats, have gaps."""
KEPT_MARKS = 2_000
KEPT_EVENTS = 10_000
"""Collectives of a rank that are kept in full, in small worlds; sums are over all."""
KEPT_IN_WORLD = 200_000
"""The same, of all ranks together."""


class SummingRecorder(Recorder):
    """Adds up every collective of this process, so that a long run needs no more memory."""

    def __init__(self, before: Recorder | None, ranks: int = 1) -> None:
        super().__init__()
        self._raw = deque(maxlen=max(500, min(KEPT_EVENTS, KEPT_IN_WORLD // ranks)))
        self.before = before
        """What recorded before; it goes on, and is put back at the end."""
        self._sums: dict[tuple[str, str], list[int]] = {}
        self.blocked_ns = 0
        """Time this rank spent in collectives; of asynchronous ones only the wait counts."""
        self.wait_ns = 0
        """The part of it that was waiting for other ranks."""

    def add(self, call: Call, rank: int) -> None:
        """Take down a call that has just ended."""
        now = time.perf_counter_ns()
        self._raw.append((call, rank, now))
        took = now - call.t_start
        blocked = call.wait_ns if call.is_async else took
        self.blocked_ns += blocked
        self.wait_ns += min(call.wait_ns, blocked)
        sums = self._sums.setdefault((call.op, call._site or ""), [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += call.sent + call.received
        sums[2] += blocked
        sums[3] += min(call.wait_ns, blocked)
        if self.before is not None:
            self.before.add(call, rank)

    def sums(self) -> list[dict[str, Any]]:
        """Return calls, bytes and times for each operation and source line."""
        names = ("calls", "bytes", "blocked_ns", "wait_ns")
        return [
            {"op": op, "site": site, **dict(zip(names, values, strict=True))}
            for (op, site), values in list(self._sums.items())
        ]


class _Tee:
    """A text stream that passes everything on and keeps a copy."""

    def __init__(self, stream: TextIO, fd: int) -> None:
        self._stream = stream
        self._fd = fd

    def write(self, text: str) -> int:
        """Pass `text` on; a full disk must not break the program that prints."""
        with suppress(OSError):
            os.write(self._fd, text.encode(errors="backslashreplace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # not there yet, as while it is unpickled
            raise AttributeError(name)
        return getattr(self._stream, name)


class OutputCopy:
    """Copies `sys.stdout` and `sys.stderr` to a file until closed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._before = sys.stdout, sys.stderr
        self._mine = tuple(_Tee(stream, self._fd) for stream in self._before)
        sys.stdout, sys.stderr = self._mine

    def write(self, text: str) -> None:
        """Put a line into the file alone."""
        with suppress(OSError):
            os.write(self._fd, text.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Put the streams back, unless somebody has put others in their place."""
        for name, mine, before in zip(("stdout", "stderr"), self._mine, self._before, strict=True):
            if getattr(sys, name) is mine:
                setattr(sys, name, before)
        os.close(self._fd)


class Run:
    """The record of this rank; `record` hands it out. Returned from a rank it becomes a `Report`.

    Attributes:
        dir: directory of the run.
        rank: this rank.
    """

    def __init__(self, directory: Path, started_ns: int, before: Recorder | None) -> None:
        self.dir = directory
        self.rank, self._size = _place()
        self.recorder = SummingRecorder(before, self._size)
        self.costs = CostLedger()
        self._zero_ns = _zero_of_run(started_ns)
        self._attempt = int(os.environ.get("UNISONO_RESTART", "0"))
        self._buffer: list[tuple[int, int, int, int, dict[str, Any]]] = []
        self._flushed_ns = 0
        self._count = 0
        self._spans: deque[tuple[str, int, int]] = deque(
            maxlen=max(200, min(KEPT_SPANS, 100_000 // self._size))
        )
        self._marks: deque[int] = deque(maxlen=KEPT_MARKS)
        self._mark_count = 0
        self._first_mark: tuple[int, int, int] | None = None
        self._last_mark: tuple[int, int, int] | None = None
        self._layouts: list[dict[str, Any]] = []
        self._config: dict[str, Any] = {}
        self._to: set[str] = set()
        self._lines = os.open(
            directories.lines_path(directory, self.rank),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
            0o666,
        )
        self._output = OutputCopy(directories.log_path(directory, self.rank))
        self._began_ns = time.perf_counter_ns()
        self._hook = register_optimizer_step_post_hook(self._mark_step)
        self._write_part("running", None)

    def __reduce__(self) -> tuple[object, ...]:
        """Travel as the report: open files stay with their rank."""
        from unisono.train.report.building import Report

        return Report, (self.dir,)

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Note the value of some metrics at a step; see `unisono.train.log`. Local."""
        now = time.perf_counter_ns()
        taken = {name: _number(name, value) for name, value in values.items()}
        if step is None:
            step, self._count = self._count, self._count + 1
        else:
            step = _step(step)
        recorder = self.recorder
        self._buffer.append((step, now, recorder.blocked_ns, recorder.wait_ns, taken))
        if now - self._flushed_ns > FLUSH_NS:
            self._flush(now)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Show the block as a bar of this name in the timeline. Local."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self._spans.append((name, begin, time.perf_counter_ns()))

    def layout(
        self, layout: Layout, shape: Sequence[int] | None = None, *, name: str = "ranks"
    ) -> None:
        """Draw in the report who holds which block.

        Args:
            layout: a `Mesh`, a `Partition`, or anything with `shape` and `ranks`.
            shape: of a whole tensor that is split over it in balanced blocks, if there is one.
            name: of the picture.
        """
        grid = tuple(layout.shape)
        if shape is not None and len(shape) != len(grid):
            raise PartitionError.because(
                f"run.layout with shape {list(shape)}",
                f"a layout of shape {list(grid)}",
                f"{len(shape)} dims != {len(grid)} dims",
                "write 1 in the layout where a dim is not split",
            )
        cuts = shape and [list(split_cuts(n, p)) for n, p in zip(shape, grid, strict=True)]
        axes = getattr(layout, "axes", None)
        self._layouts.append(
            {
                "name": name,
                "grid": list(grid),
                "ranks": list(layout.ranks),
                "axes": list(axes) if isinstance(axes, Mapping) else None,
                "shape": None if shape is None else list(shape),
                "cuts": cuts or None,
            }
        )

    def note_config(self, config: Mapping[str, Any], to: Sequence[str] = ()) -> None:
        """Remember these values beside machine and versions, and trackers to send the run to."""
        self._config |= config
        self._to |= set(to)

    def close(self, trouble: str | None) -> None:
        """Write what was measured, and put everything back as it was."""
        self._hook.remove()
        try:
            self._flush(time.perf_counter_ns())
        except Exception as error:  # a value that a GPU could not compute
            trouble = trouble or "".join(traceback.format_exception(error))
            raise
        finally:
            os.close(self._lines)
            if trouble is not None:
                self._output.write(trouble)
            self._output.close()
            self._write_part("done" if trouble is None else "failed", trouble)

    @only_observes
    def _mark_step(self, *_: object) -> None:
        """An optimizer has made a step: where a step ends if nothing is logged."""
        now = time.perf_counter_ns()
        self._marks.append(now)
        self._mark_count += 1
        self._last_mark = now, self.recorder.blocked_ns, self.recorder.wait_ns
        self._first_mark = self._first_mark or self._last_mark

    def _flush(self, now: int) -> None:
        """Append what was logged to the file of this rank."""
        self._flushed_ns = now
        logged, self._buffer = self._buffer, []
        lines = [
            json.dumps(
                {
                    "step": step,
                    "t": self._seconds(at),
                    "a": self._attempt,
                    "v": {name: float(value) for name, value in values.items()},
                    "blocked_s": blocked / 1e9,
                    "wait_s": wait / 1e9,
                }
            )
            for step, at, blocked, wait, values in logged
        ]
        if lines:
            with suppress(OSError):
                os.write(self._lines, ("\n".join(lines) + "\n").encode())

    def _seconds(self, at_ns: int) -> float:
        return round((at_ns - self._zero_ns) / 1e9, 7)

    def _write_part(self, status: str, trouble: str | None) -> None:
        """Write what this rank is; at the end also what it has measured."""
        place = here()
        part: dict[str, Any] = {
            "rank": self.rank,
            "size": self._size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": "cpu" if place is None else _device(place.device),
            "backend": dist.get_backend() if dist.is_initialized() else "none",
            "threads": torch.get_num_threads(),
            "attempt": self._attempt,
            "status": status,
            "trouble": trouble,
            "began_s": self._seconds(self._began_ns),
        }
        if status != "running":
            part |= self._measured()
        with suppress(OSError):
            directories.write_json(directories.part_path(self.dir, self.rank), part)

    def _measured(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        window = None
        if self._first_mark is not None and self._last_mark is not None:
            names = ("seconds", "blocked_s", "wait_s")
            marks = zip(names, self._first_mark, self._last_mark, strict=True)
            window = {name: (last - first) / 1e9 for name, first, last in marks}
        return {
            "ended_s": self._seconds(time.perf_counter_ns()),
            "peak_mb": peak / (2**20 if sys.platform == "darwin" else 2**10),
            "blocked_s": self.recorder.blocked_ns / 1e9,
            "wait_s": self.recorder.wait_ns / 1e9,
            "steps": window,
            "sums": self.recorder.sums(),
            "averaging": self.costs.rows(),
            "events": [
                {
                    **{name: getattr(event, name) for name in _EVENT_FIELDS},
                    "t_start": event.t_start - self._zero_ns,
                    "t_end": event.t_end - self._zero_ns,
                }
                for event in self.recorder.events
            ],
            "spans": [[n, a - self._zero_ns, b - self._zero_ns] for n, a, b in self._spans],
            "mark_count": self._mark_count,
            "marks": [at - self._zero_ns for at in self._marks],
            "layouts": self._layouts,
            "config": {name: _plain(value) for name, value in self._config.items()},
            "to": sorted(self._to),
        }


_EVENT_FIELDS = (
    *("op", "algorithm", "group", "rank", "seq", "sent", "received", "dtype"),
    *("wait_ns", "is_async", "site"),
)


def _place() -> tuple[int, int]:
    """Return this rank and the number of ranks, in whatever world this process is."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = here()
    return (0, 1) if place is None else (place.rank, detect().size)


def _device(device: torch.device) -> str:
    """Return the name of a device; of a GPU also its model."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _step(step: Any) -> int:
    """Return the number of a step; whole numbers of numpy and torch are such, too."""
    try:
        number = operator.index(step)
    except (TypeError, RuntimeError, ValueError):  # torch and numpy have their own kinds
        number = None
    if number is None or abs(number) > LARGEST_STEP:
        raise UnisonoError.because(
            f"log(step={_short(step)})",
            an(type(step).__name__),
            "no whole number" if number is None else f"beyond {LARGEST_STEP}, 2**53",
            "count the steps: log(step=3, ...), or leave step out",
        )
    return number


def _number(name: str, value: Any) -> Any:
    """Return a number that later changes of `value` do not reach; a GPU is not waited for."""
    number = value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UnisonoError.because(
                f"log({name}=...)",
                f"a tensor of shape {list(value.shape)}",
                f"{value.numel()} elements, not one",
                f"log({name}={name}.mean())",
            )
        if value.device.type != "cpu" and not value.is_complex():
            return value.detach().clone()
        number = value.item()
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnisonoError.because(
            f"log({name}={_short(value)})", an(type(value).__name__), str(error), "a number"
        ) from None


def _short(value: Any) -> str:
    """Return how a value is written, cut where it is long."""
    text = "..." if isinstance(value, int) and abs(value) > 10**40 else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    """Return what JSON can write: numbers and texts as they are, else the text of it."""
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _zero_of_run(started_ns: int) -> int:
    """Return the reading of this process's `perf_counter_ns` at the moment the run began.

    Ranks of one host share that counter. Over several hosts it is collective over the world: rank 0
    is asked for its time, as clocks of hosts differ by more than a collective takes.

    Args:
        started_ns: the moment, as `time.time_ns` of the host that began the run.
    """
    own = time.perf_counter_ns() - (time.time_ns() - started_ns)
    whole, environment = store_of_world(), detect()
    if whole is None or environment.nodes == 1:
        return own
    rank, size = environment.rank, environment.size
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("unisono/record", whole)
    store = PrefixStore(str((store.add("round", 1) - 1) // size), store)
    if rank == 0:
        store.set("zero", str(own))
    offset = clock_offset_ns(store, rank, size)
    return own if rank == 0 else int(store.get("zero")) - offset

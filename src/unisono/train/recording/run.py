"""Recording a run: `with record("name"):` around it, `log(loss=...)` and `span("forward")` in it.

Each rank writes files of its own and sends nothing, so that recording neither slows ranks down nor
lets one wait for another. Without an open record `log` and `span` return at once.
"""

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono import accelerator
from unisono.accelerator import is_accelerator
from unisono.comm.call import Call
from unisono.comm.groups import store_of_world
from unisono.comm.health import trace as tracing
from unisono.comm.health.trace import CostLedger, Recorder, clock_offset_ns
from unisono.data_parallel.nonblocking import only_observes
from unisono.environment import detect
from unisono.errors import Requeue, UnisonoError, an
from unisono.launch.context import here
from unisono.train.recording import directory as directories
from unisono.train.recording.report import Report, conclude

_CPU = torch.device("cpu")
FLUSH_NS = 200_000_000
"""What was logged is written after so long at the next call."""
KEPT_SPANS = 5_000
"""Spans of a rank that are kept."""
LARGEST_STEP = 2**53
"""Beyond it the numbers of a page, which are floats, have gaps."""
KEPT_MARKS = 2_000
"""Steps of optimizers that are kept."""
KEPT_EVENTS = 10_000
"""Collectives of a rank that are kept in full, in small worlds; sums are over all."""
KEPT_IN_WORLD = 200_000
"""The same, of all ranks together."""
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


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


def _append(fd: int, text: str) -> None:
    """Write to a file of the record; a full disk must not break the program that is recorded."""
    with suppress(OSError):
        os.write(fd, _printable(text).encode())


def _printable(text: str) -> str:
    """Return text that every file can hold: the name of a file of another coding may be none."""
    return text.encode(errors="backslashreplace").decode()


class _Tee:
    """A text stream that passes everything on and keeps a copy."""

    def __init__(self, stream: TextIO, fd: int) -> None:
        self._stream = stream
        self._fd = fd

    def write(self, text: str) -> int:
        """Pass `text` on."""
        _append(self._fd, text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Pass all of `lines` on."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # not there yet, as while it is unpickled
            raise AttributeError(name)
        return getattr(self._stream, name)


class OutputCopy:
    """Copies `sys.stdout` and `sys.stderr` to a file until closed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, _APPEND, 0o666)
        self._before = sys.stdout, sys.stderr
        self._tees = tuple(_Tee(stream, self._fd) for stream in self._before)
        sys.stdout, sys.stderr = self._tees

    def write(self, text: str) -> None:
        """Put a line into the file alone."""
        _append(self._fd, text)

    def close(self) -> None:
        """Put the streams back, unless they were replaced meanwhile."""
        for name, tee, before in zip(("stdout", "stderr"), self._tees, self._before, strict=True):
            if getattr(sys, name) is tee:
                setattr(sys, name, before)
        os.close(self._fd)


class Run:
    """The record of this rank; `record` hands it out. Returned from a rank it becomes a `Report`.

    Everything here is local to the rank.

    Attributes:
        dir: directory of the run.
        rank: this rank.
    """

    def __init__(self, directory: Path, started_ns: int, before: Recorder | None) -> None:
        self.dir = directory
        self.rank, self._size = _place()
        self.recorder = SummingRecorder(before, self._size)
        self.costs = CostLedger()
        self._zero_ns = _zero_of_run(started_ns, self.rank, self._size)
        self._attempt = int(os.environ.get("UNISONO_RESTART", "0"))
        self._buffer: list[tuple[int, int, int, int, dict[str, Any]]] = []
        self._flushed_ns = 0
        self._count = 0
        self._names: set[str] = set()
        """Metrics of the latest step that no call has named."""
        self._logged_at = 0
        """Optimizer steps when it was logged."""
        self._spans: deque[tuple[str, int, int]] = deque(
            maxlen=max(200, min(KEPT_SPANS, 100_000 // self._size))
        )
        self._marks: deque[tuple[int, int, int]] = deque(maxlen=KEPT_MARKS)
        self._mark_count = 0
        self._config: dict[str, Any] = {}
        self._lines = os.open(directories.rank_file(directory, self.rank, "jsonl"), _APPEND, 0o666)
        self._output = OutputCopy(directories.rank_file(directory, self.rank, "log"))
        self._began_ns = time.perf_counter_ns()
        self._hook = register_optimizer_step_post_hook(self._mark_step)
        self._write_part("running", None)

    def __reduce__(self) -> tuple[object, ...]:
        """Travel as the report: open files stay with their rank."""
        return Report, (self.dir,)

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Note the value of some metrics at a step; see `unisono.train.log`. Local."""
        now = time.perf_counter_ns()
        numbers = {name: _number(name, value) for name, value in values.items()}
        step = self._implied_step(numbers) if step is None else _step(step)
        recorder = self.recorder
        self._buffer.append((step, now, recorder.blocked_ns, recorder.wait_ns, numbers))
        if now - self._flushed_ns > FLUSH_NS:
            self._flush(now)

    def _implied_step(self, names: Iterable[str]) -> int:
        """Return the step of a call that names none.

        Calls between two steps of an optimizer belong together, unless a name comes again.
        """
        has_stepped, self._logged_at = self._mark_count != self._logged_at, self._mark_count
        if self._count == 0 or has_stepped or not self._names.isdisjoint(names):
            self._count += 1
            self._names = set()
        self._names |= set(names)
        return self._count - 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Show the block as a bar of this name in the timeline. Local."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self._spans.append((name, begin, time.perf_counter_ns()))

    def note_config(self, config: Mapping[str, Any]) -> None:
        """Remember these values beside machine and versions."""
        self._config |= config

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
        at = time.perf_counter_ns() - self._zero_ns
        self._marks.append((at, self.recorder.blocked_ns, self.recorder.wait_ns))
        self._mark_count += 1

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
                    "v": {_printable(name): float(value) for name, value in values.items()},
                    "blocked_s": blocked / 1e9,
                    "wait_s": wait / 1e9,
                }
            )
            for step, at, blocked, wait, values in logged
        ]
        if lines:
            _append(self._lines, "\n".join(lines) + "\n")

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
            "device": _device_name(None if place is None else place.device),
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
            directories.write_json(directories.rank_file(self.dir, self.rank, "json"), part)

    def _measured(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "ended_s": self._seconds(time.perf_counter_ns()),
            "peak_mb": peak / (2**20 if sys.platform == "darwin" else 2**10),
            "blocked_s": self.recorder.blocked_ns / 1e9,
            "wait_s": self.recorder.wait_ns / 1e9,
            "sums": self.recorder.sums(),
            "averaging": self.costs.rows(),
            "events": [
                asdict(e) | {"t_start": e.t_start - self._zero_ns, "t_end": e.t_end - self._zero_ns}
                for e in self.recorder.events
            ],
            "spans": [[n, a - self._zero_ns, b - self._zero_ns] for n, a, b in self._spans],
            "mark_count": self._mark_count,
            "marks": list(self._marks),
            "config": {name: _plain(value) for name, value in self._config.items()},
        }


def _place() -> tuple[int, int]:
    """Return this rank and the number of ranks, in whatever world this process is."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = here()
    return (0, 1) if place is None else (place.rank, detect().size)


def _device_name(device: torch.device | None) -> str:
    """Return the name of a device, by default the one in use; of a GPU also its model."""
    if device is None:
        device = (accelerator.current() if accelerator.initialised() else None) or _CPU
    return f"{device} ({accelerator.name(device)})" if is_accelerator(device) else str(device)


def _step(step: Any) -> int:
    """Return the number of a step; it may be an integer of numpy or torch."""
    problem = f"beyond {LARGEST_STEP}, 2**53"
    try:
        if abs(number := operator.index(step)) <= LARGEST_STEP:
            return number
    except (TypeError, RuntimeError, ValueError):  # torch and numpy have their own kinds
        problem = f"{an(type(step).__name__)}, not an integer"
    call = f"log(step={step!r:.60})"
    raise UnisonoError.because(call, problem, hint="count the steps: log(step=3, ...)")


def _number(name: str, value: Any) -> Any:
    """Return a number that later changes of `value` do not reach; a GPU is not waited for."""
    number = value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            call, problem = f"log({name}=...)", f"a tensor of shape {list(value.shape)}"
            raise UnisonoError.because(call, problem, hint=f"log({name}={name}.mean())")
        if value.device.type != "cpu" and not value.is_complex():
            return value.detach().clone()
        number = value.item()
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError) as error:
        call, kind = f"log({name}={value!r:.60})", an(type(value).__name__)
        raise UnisonoError.because(call, kind, str(error), "a number") from None


def _plain(value: Any) -> Any:
    """Return what JSON can write: numbers and texts as they are, else the text of it."""
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _zero_of_run(started_ns: int, rank: int, size: int) -> int:
    """Return the reading of this process's `perf_counter_ns` at the moment the run began.

    Ranks of one host share that counter. Over several hosts it is collective over the world: rank 0
    is asked for its time, as clocks of hosts differ by more than a collective takes.

    Args:
        started_ns: the moment, as `time.time_ns` of the host that began the run.
        rank: this rank.
        size: number of ranks.
    """
    zero_ns = time.perf_counter_ns() - (time.time_ns() - started_ns)
    whole = store_of_world()
    if whole is None or detect().nodes == 1:
        return zero_ns
    store = PrefixStore("unisono/record", whole)
    store = PrefixStore(str((store.add("round", 1) - 1) // size), store)
    if rank == 0:
        store.set("zero", str(zero_ns))
    offset = clock_offset_ns(store, rank, size)
    return zero_ns if rank == 0 else int(store.get("zero")) - offset


# The record that is open in this process.

_active: Run | None = None
_OFF = nullcontext()


def current_run() -> Run | None:
    """Return the record that is open in this process, or None."""
    return _active


def log(*, step: int | None = None, **values: Any) -> None:
    """Note the value of some metrics at a step, if a record is open; else do nothing. Local.

    A step gets the mean over the ranks that logged it; `samples` is added up instead, and gives the
    throughput. Values are numbers or tensors of one element; those of a GPU are not waited for
    here, but when they are written, up to five times a second.

    Args:
        step: number of the step. Left out, it is counted from 0: a call begins a new step if an
            optimizer has stepped since the call before, or if it repeats a metric.
        values: one keyword a metric.

    >>> log(loss=0.5, samples=64)
    """
    if _active is not None:
        _active.log(step=step, **values)


def span(name: str) -> AbstractContextManager[None]:
    """Show the block as a bar of this name in the timeline of the report. Local; free when off.

    >>> with span("forward"):
    ...     pass
    """
    return _OFF if _active is None else _active.span(name)


def record(
    name: str = "run",
    *,
    config: Mapping[str, Any] | None = None,
    command: bool = True,
) -> AbstractContextManager[Run]:
    """Keep a record of the block in `runs/<name>/`: metrics, traces, logs and `report.html`.

    Collective over the world. Every rank gets a `Run`, rank 0 writes the report at the end. Where a
    record is open already (`unisono run --record`), that one is used and stays open.

    Args:
        name: of the run; a taken name gets a number. With a slash in it, a path of its own.
        config: what to remember beside machine and versions: learning rate, sizes, ...
        command: whether to remember the words of the command line, too; False where they hold a
            password or a token. `unisono run --record` has `--no-command` for it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with record(f"{folder}/digits", config={"lr": 0.1}) as run:
    ...         run.log(loss=0.5)
    ...     (run.dir / "metrics.csv").read_text().split(",")[:2]
    ['step', 'seconds']
    """
    return _recording(name, dict(config or {}), command)


@contextmanager
def _recording(name: str, config: dict[str, Any], has_command: bool) -> Iterator[Run]:
    from unisono.launch import world

    comm = world()
    if _active is not None:
        _active.note_config(config)
        yield _active
        return
    made: tuple[str, int] | UnisonoError | None = None
    if comm.rank == 0:
        try:
            made = directories.begin_run(name, has_command=has_command)
        except UnisonoError as error:
            made = error
    made = comm.broadcast_object(made)
    if not isinstance(made, tuple):
        raise made or UnisonoError(f"record({name!r}) found no directory")
    directory = Path(made[0])
    try:
        with opened(directory, made[1]) as run:
            run.note_config(config)
            yield run
        comm.barrier()  # the parts of all ranks are there
    finally:
        if comm.rank == 0:
            conclude(directory)


@contextmanager
def opened(directory: Path, started_ns: int) -> Iterator[Run]:
    """Let everything inside be written down by a `Run`, which is closed however it ends."""
    global _active
    run = _active = Run(directory, started_ns, tracing.recorder)
    tracing.recorder = run.recorder
    trouble = None
    try:
        yield run
    except BaseException as error:
        is_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if not is_exit and not isinstance(error, Requeue):
            trouble = "".join(traceback.format_exception(error))
        raise
    finally:
        _active = None
        if tracing.recorder is run.recorder:
            tracing.recorder = run.recorder.before
        run.close(trouble)

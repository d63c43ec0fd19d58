"""Recording a run: `with record("name"):` around it, `log(loss=...)` and `span("forward")` in it.

Each rank writes files of its own and sends nothing, so that recording neither slows ranks down nor
lets one wait for another. Without an open record `log` and `span` return at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.comm.health import trace as averaging_costs
from unisono.comm.health import trace as tracing
from unisono.errors import Requeue, UnisonoError
from unisono.train.recording.directory import begin_run
from unisono.train.recording.run import Run
from unisono.train.report.trackers import check_trackers

__all__ = ["call_recorded", "current_run", "log", "record", "span"]

_active: Run | None = None
_OFF = nullcontext()


def current_run() -> Run | None:
    """Return the record that is open in this process, or None."""
    return _active


def log(*, step: int | None = None, **values: Any) -> None:
    """Note the value of some metrics at a step, if a record is open; else do nothing. Local.

    A step gets the mean over the ranks that logged it; `samples` is added up instead, and gives the
    throughput. Values are numbers or tensors of one element; those of a GPU are not waited for.

    Args:
        step: number of the step; counted from 0 if left out.
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


class record:
    """Keep a record of the block in `runs/<name>/`: metrics, traces, logs and `report.html`.

    Collective over the world. Every rank gets a `Run`, rank 0 writes the report at the end. Where a
    record is open already (`unisono run --record`), that one is used and stays open.

    Args:
        name: of the run; a taken name gets a number. With a slash in it, a path of its own.
        config: what to remember beside machine and versions: learning rate, sizes, ...
        command: whether to remember the words of the command line, too; False where they hold a
            password or a token. `unisono run --record` has `--no-command` for it.
        to: experiment trackers that get metrics, `config` and the report when the run has ended:
            "tensorboard", "mlflow", "wandb". Their own settings say where.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with record(f"{folder}/digits", config={"lr": 0.1}) as run:
    ...         run.log(loss=0.5)
    ...     (run.dir / "metrics.csv").read_text().split(",")[:2]
    ['step', 'seconds']
    """

    def __init__(
        self,
        name: str = "run",
        *,
        config: Mapping[str, Any] | None = None,
        command: bool = True,
        to: str | Sequence[str] = (),
    ) -> None:
        self._name = name
        self._to = check_trackers(to)
        self._has_command = command
        self._config = dict(config or {})
        self._run: Run | None = None

    def __enter__(self) -> Run:
        from unisono.launch import world

        comm = world()
        if _active is not None:
            _active.note_config(self._config, self._to)
            return _active
        made: tuple[str, int] | None = None
        trouble: UnisonoError | None = None
        if comm.rank == 0:
            try:
                made = begin_run(self._name, has_command=self._has_command)
            except UnisonoError as error:
                trouble = error
        made, trouble = comm.broadcast_object((made, trouble))
        if made is None:
            raise trouble or UnisonoError(f"record({self._name!r}) found no directory")
        self._run = _open(Path(made[0]), made[1])
        self._run.note_config(self._config, self._to)
        return self._run

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._run is None:
            return
        from unisono.launch import world
        from unisono.train.report.building import conclude

        run, self._run = self._run, None
        _close(run, error)
        comm = world()
        try:
            if error is None:
                comm.barrier()  # the parts of all ranks are there
        finally:
            if comm.rank == 0:
                conclude(run.dir)


def call_recorded(directory: str, started_ns: int, function: Callable[[], object]) -> object:
    """In a rank: call `function` with a record open whose report the launcher writes."""
    run = _open(Path(directory), started_ns)
    try:
        value = function()
    except BaseException as error:
        _close(run, error)
        raise
    _close(run, None)
    return value


def _open(directory: Path, started_ns: int) -> Run:
    global _active
    _active = Run(directory, started_ns, tracing.recorder)
    tracing.recorder = _active.recorder
    averaging_costs.ledger = _active.costs
    return _active


def _close(run: Run, error: BaseException | None) -> None:
    global _active
    _active = None
    if tracing.recorder is run.recorder:
        tracing.recorder = run.recorder.before
    averaging_costs.ledger = None
    is_fine = error is None or isinstance(error, Requeue)
    if isinstance(error, SystemExit):
        is_fine = error.code in (None, 0)
    run.close(None if is_fine else "".join(traceback.format_exception(error)))

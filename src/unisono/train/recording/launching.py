"""A launcher around a run that is recorded: `run(..., record=)`, `unisono run --record`, `--watch`.

Ranks record; whoever started them writes the report when they have ended, well or not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.environment import detect
from unisono.errors import PlatformError
from unisono.launch.api import execute, submit_request
from unisono.launch.request import Request
from unisono.launch.results import Results
from unisono.launch.stopping import signals_of_launcher
from unisono.train.recording.report import Report, conclude


def run_recorded(request: Request, name: str, *, watch: bool) -> Results[Any]:
    """Run a request with recording ranks, and with a page that shows them if that is wanted."""
    if request.joins_world:
        if watch and detect().rank == 0:
            print("unisono: already in a world; watch is not used", file=sys.stderr)
        return execute(in_world(request, name))
    if watch and request.place == "inline":
        raise PlatformError.because(
            'unisono.run(..., on="inline", watch=True)',
            "a run in this very process, which is busy with it",
            hint='on="cpu", ranks=1',
        )
    request, directory = into_directory(request, name)
    try:
        results = watched(request, directory) if watch else execute(request)
    finally:
        write_report(directory)
    results.report = Report(directory)
    return results


def in_world(
    request: Request, name: str, *, has_command: bool = True, to: Sequence[str] = ()
) -> Request:
    """Return the request of ranks that somebody else started, which agree on a directory."""
    return _calling(request, functools.partial(call_in_world, name, has_command, to))


def call_in_rank(directory: str, started_ns: int, function: Callable[[], object]) -> object:
    """In a rank: call `function` with a record open."""
    from unisono.train.recording.run import call_recorded

    return call_recorded(directory, started_ns, function)


def call_in_world(
    name: str, has_command: bool, to: Sequence[str], function: Callable[[], object]
) -> object:
    """In a rank that somebody else started: the same, its directory agreed on by all ranks."""
    from unisono.train.recording.run import record

    with record(name, command=has_command, to=to):
        return function()


def into_directory(
    request: Request, name: str, *, has_command: bool = True, to: Sequence[str] = ()
) -> tuple[Request, Path]:
    """Return the request with its ranks recording, and the directory that they write to."""
    from unisono.train.recording.directory import begin_run

    directory, started_ns = begin_run(name, has_command=has_command, to=to)
    wrapper = functools.partial(call_in_rank, directory, started_ns)
    return _calling(request, wrapper), Path(directory)


def _calling(request: Request, wrapper: Callable[[Callable[[], object]], object]) -> Request:
    """Return the request with its function called by `wrapper`."""
    function = functools.partial(request.fn, *request.args, **request.kwargs)
    return replace(request, fn=functools.partial(wrapper, function), args=(), kwargs={})


def write_report(directory: Path) -> Path:
    """Write the report of a run that has ended, well or not, and say where it is."""
    path = conclude(directory)
    print(f"unisono: report in {near(path)}", file=sys.stderr)
    return path


def watched(request: Request, directory: Path) -> Results[Any]:
    """Run a request while a page shows it, and return its results."""
    from unisono.train.recording.live import LiveView

    with signals_of_launcher():
        job = submit_request(request)
        try:
            with LiveView(directory, job, request.ranks) as view:
                print(f"unisono: watch at {view.url}", file=sys.stderr, flush=True)
                _show_below_cell(view)
                job.wait()
        except BaseException:
            job.cancel()
            raise
    return job.result()


def _show_below_cell(view: object) -> None:
    """In a notebook: show the page below the cell."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        ipython.display.display(view)


def near(path: Path) -> Path:
    """Return `path` as one would type it from here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

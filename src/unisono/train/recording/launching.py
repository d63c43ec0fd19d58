"""A launcher around a run that is recorded: `run(..., record=)`, `unisono run --record`, `--watch`.

Ranks record; their launcher writes the report when they have ended, well or not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.environment import detect
from unisono.errors import PlatformError
from unisono.launch.api import execute, submit_request
from unisono.launch.request import RunRequest
from unisono.launch.results import Results
from unisono.launch.stopping import signals_of_launcher
from unisono.train.recording.directory import begin_run
from unisono.train.recording.report import Report, conclude


def run_recorded(request: RunRequest, name: str, *, watch: bool) -> Results[Any]:
    """Run a request with recording ranks, and with a page that shows them if that is wanted."""
    with recorded(request, name, watch=watch) as (request, directory):
        results = watched(request, directory) if watch and directory else execute(request)
    if directory is not None:
        results.report = Report(directory)
    return results


@contextmanager
def recorded(
    request: RunRequest,
    name: str,
    *,
    watch: bool = False,
    detach: bool = False,
    has_command: bool = True,
) -> Iterator[tuple[RunRequest, Path | None]]:
    """Yield the request with recording ranks and their directory; write the report at the end.

    Ranks of another launcher agree on a directory themselves: None is yielded for it.

    Args:
        request: what is to be run inside.
        name: of the run.
        watch: whether a page will show it.
        detach: whether it goes on when the block has ended: the report is left to the user.
        has_command: whether the words of the command line are kept.
    """
    if request.joins_world:
        if watch and detect().rank == 0:
            print("unisono: already in a world; watch is not used", file=sys.stderr)
        yield _calling(request, functools.partial(call_in_world, name, has_command)), None
        return
    if watch and request.place == "inline":
        raise PlatformError.because(
            'unisono.run(..., on="inline") with a page that watches it',
            "a run in this very process, which is busy with it",
            hint='on="cpu", ranks=1, or --on cpu --ranks 1',
        )
    directory, started_ns = begin_run(name, has_command=has_command)
    path = Path(directory)
    request = _calling(request, functools.partial(call_in_rank, directory, started_ns))
    if detach:
        yield request, path
        print(f"unisono: unisono report {near(path)} when it has ended", file=sys.stderr)
        return
    try:
        yield request, path
    finally:
        print(f"unisono: report in {near(conclude(path))}", file=sys.stderr)


def call_in_rank(directory: str, started_ns: int, function: Callable[[], object]) -> object:
    """In a rank: call `function` with a record open whose report the launcher writes."""
    from unisono.train.recording.run import opened

    with opened(Path(directory), started_ns):
        return function()


def call_in_world(name: str, has_command: bool, function: Callable[[], object]) -> object:
    """In a rank of another launcher: the same, its directory agreed on by all ranks."""
    from unisono.train.recording.run import record

    with record(name, command=has_command):
        return function()


def _calling(request: RunRequest, wrapper: Callable[[Callable[[], object]], object]) -> RunRequest:
    """Return the request with its function called by `wrapper`."""
    function = functools.partial(request.fn, *request.args, **request.kwargs)
    return replace(request, fn=functools.partial(wrapper, function), args=(), kwargs={})


def watched(request: RunRequest, directory: Path) -> Results[Any]:
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

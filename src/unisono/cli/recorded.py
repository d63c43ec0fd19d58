"""`unisono run --record` and `--watch`: what the launcher does around a run that is recorded."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import PlatformError

if TYPE_CHECKING:
    from unisono.launch.request import Request
    from unisono.launch.results import Results


def settle_words(args: argparse.Namespace) -> None:
    """Give a script back that `--record script.py` took for the name of the run."""
    if args.record and args.target is None and args.module is None:
        args.target, args.record = args.record, ""
    if args.watch and args.record is None:
        args.record = ""


def recorded_name(args: argparse.Namespace) -> str:
    """Return the name of the run: as given, else that of the script, module or function."""
    target = args.module or args.target
    return args.record or Path(target.replace(":", ".")).name.removesuffix(".py")


def call_in_rank(directory: str, started_ns: int, function: Callable[[], object]) -> object:
    """In a rank: call `function` with a record open."""
    from unisono.train.recording.opening import call_recorded

    return call_recorded(directory, started_ns, function)


def call_in_world(name: str, has_command: bool, function: Callable[[], object]) -> object:
    """In a rank that somebody else started: the same, its directory agreed on by all ranks."""
    from unisono.train.recording.opening import record

    with record(name, command=has_command):
        return function()


def into_directory(request: Request, name: str, *, has_command: bool) -> tuple[Request, Path]:
    """Return the request with its ranks recording, and the directory that they write to."""
    from unisono.train.recording.facts import begin_run

    directory, started_ns = begin_run(name, has_command=has_command)
    wrapper = functools.partial(call_in_rank, directory, started_ns)
    return _calling(request, wrapper), Path(directory)


def _calling(request: Request, wrapper: Callable[[Callable[[], object]], object]) -> Request:
    """Return the request with its function called by `wrapper`."""
    function = functools.partial(request.fn, *request.args, **request.kwargs)
    return replace(request, fn=functools.partial(wrapper, function), args=(), kwargs={})


@contextmanager
def recording(args: argparse.Namespace, request: Request) -> Iterator[tuple[Request, Path | None]]:
    """Yield the request with recording ranks if that is asked for; write the report at the end."""
    if args.record is None:
        yield request, None
        return
    from unisono.launch.detection import is_in_world

    name = recorded_name(args)
    if request.platform.detect and is_in_world():
        wrapper = functools.partial(call_in_world, name, not args.no_command)
        yield _calling(request, wrapper), None
        return
    request, directory = into_directory(request, name, has_command=not args.no_command)
    if args.detach:  # to a scheduler: nobody here waits for the end
        yield request, directory
        print(f"unisono: unisono report {near(directory)} when it has ended", file=sys.stderr)
        return
    try:
        yield request, directory
    finally:
        write_report(directory)


def write_report(directory: Path) -> Path:
    """Write the report of a run that has ended, well or not, and say where it is."""
    from unisono.train.report.building import finish

    path = finish(directory)
    print(f"unisono: report in {near(path)}", file=sys.stderr)
    return path


def watched(request: Request, directory: Path | None) -> Results[Any]:
    """Run a request while a page shows it, and return its results."""
    from unisono.launch.interrupts import termination_as_exception
    from unisono.launch.job import submit_request
    from unisono.train.report.live import LiveView

    if request.place == "inline" or directory is None:
        raise PlatformError.because(
            "unisono run --watch",
            "a run in this very process, which is busy with it",
            hint="--on cpu --ranks 1",
        )
    with termination_as_exception():
        job = submit_request(request)
        try:
            with LiveView(directory, job, request.ranks) as view:
                print(f"unisono: watch at {view.url}", file=sys.stderr, flush=True)
                job.wait()
        except BaseException:
            job.cancel()
            raise
    return job.result()


def near(path: Path) -> Path:
    """Return `path` as one would type it from here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path

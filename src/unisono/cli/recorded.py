"""`unisono run --record` and `--watch`: what the launcher does around a run that is recorded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def recording(args: argparse.Namespace, request: Request) -> Iterator[tuple[Request, Path | None]]:
    """Yield the request with recording ranks if that is asked for; write the report at the end."""
    if args.record is None:
        yield request, None
        return
    from unisono.launch.detection import is_in_world
    from unisono.train.recording import launching

    name = recorded_name(args)
    if request.platform.detect and is_in_world():
        yield launching.in_world(request, name, has_command=not args.no_command), None
        return
    request, directory = launching.into_directory(request, name, has_command=not args.no_command)
    if args.detach:  # to a scheduler: nobody here waits for the end
        yield request, directory
        where = launching.near(directory)
        print(f"unisono: unisono report {where} when it has ended", file=sys.stderr)
        return
    try:
        yield request, directory
    finally:
        launching.write_report(directory)


def watched(request: Request, directory: Path | None) -> Results[Any]:
    """Run a request while a page shows it, and return its results."""
    from unisono.train.recording import launching

    if request.place == "inline" or directory is None:
        raise PlatformError.because(
            "unisono run --watch",
            "a run in this very process, which is busy with it",
            hint="--on cpu --ranks 1",
        )
    return launching.watched(request, directory)

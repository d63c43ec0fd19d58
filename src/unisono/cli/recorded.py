"""`unisono report`, `trace` and `checkpoint`: what runs have left on the disk."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from unisono import trace_file
from unisono.errors import PlatformError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add these commands to the command line."""
    report = commands.add_parser(
        "report",
        help="build and open the report of a recorded run",
        description="Rebuild the report of a run that `unisono run --record` or `train.record` "
        "recorded from what its ranks wrote, and open it. Also works during the run.",
    )
    report.add_argument("directory", type=Path, metavar="DIR", help="such as runs/NAME")
    report.add_argument(
        "--against", type=Path, nargs="+", metavar="DIR", help="other runs to compare it with"
    )
    report.add_argument("--no-open", action="store_true", help="only build it")
    report.set_defaults(execute=_report)
    trace = commands.add_parser(
        "trace",
        help="summarise a trace of collectives",
        description="Print calls, bytes, time and waiting time of every collective in a trace that "
        "UNISONO_TRACE=FILE or comm.trace(FILE) wrote.",
    )
    trace.add_argument("path", type=Path, help="a trace file, or a directory with some")
    trace.add_argument("--chrome", type=Path, metavar="OUT", help="merge all events into a file")
    trace.set_defaults(execute=_trace)
    checkpoint = commands.add_parser(
        "checkpoint",
        help="convert checkpoints of earlier versions",
        description="Work on directories of unisono.train.Checkpoint.",
    )
    actions = checkpoint.add_subparsers(title="actions", metavar="ACTION", required=True)
    words = "copy checkpoints into the format of this version"
    action = actions.add_parser("convert", help=words, description=f"{words.capitalize()}.")
    action.add_argument("old", type=Path, help="a directory of checkpoints")
    action.add_argument("new", type=Path, help="the directory to write, new or empty")
    action.set_defaults(execute=_convert)


def _report(args: argparse.Namespace) -> int:
    """Build the page, print its path, open it."""
    from unisono.train.recording.report import build_report

    path = build_report(args.directory, against=args.against)
    print(path)
    if not args.no_open and _has_screen():
        import webbrowser

        webbrowser.open(path.absolute().as_uri())
    return 0


def _has_screen() -> bool:
    """Whether a browser would have a screen to show a page on."""
    if sys.platform in ("darwin", "win32"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _trace(args: argparse.Namespace) -> int:
    """Read the files, print the table, write the joined file if asked."""
    events = [event for path in _files(args.path) for event in _load(path)]
    print(trace_file.table(events) if events else "the trace has no collectives")
    if args.chrome:
        trace_file.write(args.chrome, events)
        text = f"unisono: wrote {args.chrome}: open it at ui.perfetto.dev or chrome://tracing"
        print(text, file=sys.stderr)
    return 0


def _files(path: Path) -> list[Path]:
    """Return the trace files that `path` means."""
    if path.is_dir():
        paths = sorted(p for p in path.glob("*trace*.json*") if p.is_file())
    else:
        paths = [path] if path.exists() else sorted(path.parent.glob(f"{path.name}.rank*"))
    if not paths:
        raise PlatformError.because(
            f"unisono trace {path}",
            "no trace there",
            hint="UNISONO_TRACE=trace.json unisono run ... writes one",
        )
    return paths


def _load(path: Path) -> list[dict[str, Any]]:
    """Read one file; say so if it is something else."""
    try:
        return trace_file.load(path)
    except (ValueError, KeyError, TypeError) as error:
        raise PlatformError.because(
            f"unisono trace {path}",
            f"a file that is not a trace of collectives ({type(error).__name__}: {error})",
            hint="give the file that UNISONO_TRACE=FILE or comm.trace(FILE) wrote",
        ) from error


def _convert(args: argparse.Namespace) -> int:
    from unisono.train.checkpoint import convert

    for path in convert(args.old, args.new):
        print(path)
    return 0

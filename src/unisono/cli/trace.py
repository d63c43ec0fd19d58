"""`unisono trace`: the table of a saved trace, and its file for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from unisono import trace_file
from unisono.cli.outcome import OK
from unisono.errors import PlatformError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "trace",
        help="summarise a trace of collectives",
        description="Print calls, bytes, time and waiting time of every collective in a trace that "
        "UNISONO_TRACE=FILE or comm.trace(FILE) wrote.",
    )
    parser.add_argument("path", type=Path, help="a trace file, or a directory with some")
    parser.add_argument("--chrome", type=Path, metavar="OUT", help="merge all events into a file")
    parser.add_argument("--json", action="store_true", help="print the events as JSON")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Read the files, print the table, write the joined file if asked."""
    events = [event for path in _files(args.path) for event in _load(path)]
    if args.json:
        print(json.dumps(events))
    elif events:
        print(trace_file.table(events))
    else:
        print("the trace has no collectives")
    if args.chrome:
        trace_file.write(args.chrome, events)
        text = f"unisono: wrote {args.chrome}: open it at ui.perfetto.dev or chrome://tracing"
        print(text, file=sys.stderr)
    return OK


def _files(path: Path) -> list[Path]:
    """Return the trace files that `path` means."""
    if path.is_dir():
        found = sorted(p for p in path.glob("*trace*.json*") if p.is_file())
    else:
        found = [path] if path.exists() else sorted(path.parent.glob(f"{path.name}.rank*"))
    if not found:
        raise PlatformError.because(
            f"unisono trace {path}",
            "no trace there",
            hint="UNISONO_TRACE=trace.json unisono run ... writes one",
        )
    return found


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

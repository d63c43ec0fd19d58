"""`unisono report`: the page of a recorded run, made again and opened."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from unisono.cli.outcome import OK


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "report",
        help="make and open the report of a recorded run",
        description="Make the report of a run that `unisono run --record` or `train.record` wrote "
        "again from what its ranks left, and open it. Works while the run is under way, too.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="as runs/NAME")
    parser.add_argument(
        "--against", type=Path, nargs="+", metavar="DIR", help="other runs to draw beside it"
    )
    parser.add_argument("--no-open", action="store_true", help="only make it")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Make the page, say where it is, show it."""
    from unisono.train.recording.report import build_report

    path = build_report(args.directory, against=args.against)
    print(path)
    if not args.no_open and has_screen():
        import webbrowser

        webbrowser.open(path.absolute().as_uri())
    return OK


def has_screen() -> bool:
    """Whether a browser would have a screen to show a page on."""
    if sys.platform in ("darwin", "win32"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))

"""`unisono report`: rebuild and open the page of a recorded run."""

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
        help="build and open the report of a recorded run",
        description="Rebuild the report of a run that `unisono run --record` or `train.record` "
        "recorded from what its ranks wrote, and open it. Also works during the run.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="such as runs/NAME")
    parser.add_argument(
        "--against", type=Path, nargs="+", metavar="DIR", help="other runs to compare it with"
    )
    parser.add_argument("--no-open", action="store_true", help="only build it")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Build the page, print its path, open it."""
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

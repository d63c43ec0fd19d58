"""`unisono checkpoint`: bring checkpoints of earlier versions into the format of this one."""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono.cli.outcome import OK


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "checkpoint",
        help="convert checkpoints of earlier versions",
        description="Work on directories of unisono.train.Checkpoint.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    words = "copy checkpoints into the format of this version"
    action = actions.add_parser("convert", help=words, description=f"{words.capitalize()}.")
    action.add_argument("old", type=Path, help="a directory of checkpoints")
    action.add_argument("new", type=Path, help="the directory to write, new or empty")
    action.set_defaults(execute=_convert)


def _convert(args: argparse.Namespace) -> int:
    from unisono.train.checkpoint import convert

    for path in convert(args.old, args.new):
        print(path)
    return OK

"""`unisono compare`: run a script on one rank and on several, and say what differs first."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from unisono.cli import targets
from unisono.cli.outcome import FAILED, OK
from unisono.errors import PlatformError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "compare",
        help="say why one rank and several give other results",
        description="Run a script on several numbers of ranks, the first of them twice. Print the "
        "first step and tensor that differ by more than rounding, and the cause.",
        epilog="example: unisono compare --ranks 1,2,4 train.py -- --epochs 1",
    )
    parser.add_argument("target", help="script.py, or package.module:function")
    parser.add_argument("-n", "--ranks", default="1,2", metavar="N,M", help="1,2 if not given")
    parser.add_argument("--on", help="where ranks run, as for unisono run")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="steps to follow (50)")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="deadline of each run")
    parser.add_argument(
        "--record", metavar="NAME", help="keep it in runs/NAME, with a report: curves, modules"
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Compare, print the table, write a record with its report if asked."""
    from unisono.cli.run import parse_words
    from unisono.testing.comparing import compare
    from unisono.train.recording.launching import near

    try:
        ranks = [int(word) for word in args.ranks.split(",")]
    except ValueError:
        raise PlatformError.because(
            f"unisono compare --ranks {args.ranks}", "not a list of numbers", hint="--ranks 1,2,4"
        ) from None
    is_script = ":" not in args.target or args.target.endswith(".py")
    if is_script:
        path = targets.check_script(args.target)
        function = functools.partial(targets.run_script, path, args.forwarded)
    else:
        function = targets.named_call(args.target, *parse_words(args.forwarded))
    comparison = compare(
        function,
        ranks=ranks,
        on=args.on,
        steps=args.steps,
        timeout_s=args.timeout_s,
        name=Path(args.target).name,
        is_script=is_script,
    )
    print(comparison)
    if args.record is not None:
        print(f"unisono: report in {near(comparison.record(args.record))}", file=sys.stderr)
    return OK if comparison.is_equal else FAILED

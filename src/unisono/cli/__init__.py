"""The `unisono` command. Help and argument errors import neither torch nor numpy."""

from __future__ import annotations

import argparse
import difflib
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import unisono
from unisono.cli import (
    completion,
    doctor,
    job,
    plan,
    recorded,
    run,
    shipped,
)
from unisono.cli.completion import subcommands
from unisono.errors import MissingExtra, PlatformError, RankTimeout, RemoteError, UnisonoError
from unisono.removed import REMOVED

__all__ = ["main"]

_UNREAD = 141
"""Exit code where nothing reads the output any more."""


class _Parser(argparse.ArgumentParser):
    """Takes options by their whole names only, and so do the parsers of its commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="unisono",
        description="Many ranks, one model: run a PyTorch function on any number of ranks.",
        epilog="Exit codes: 0 success, 1 the function or a check failed, 2 wrong usage, "
        "124 deadline passed, 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"unisono {unisono.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (run, job, shipped, recorded, doctor, plan, completion):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    _check_command(words, parser)
    words = _with_dashes(words, parser)
    # What follows the first -- belongs to the user's script or function.
    cut = words.index("--") if "--" in words else len(words)
    ours, forwarded = words[:cut], words[cut + 1 :]
    args, unknown = parser.parse_known_args(ours)
    if unknown:
        parser.error(_explanation(args, unknown, ours, parser))
    args.forwarded = forwarded
    debug = getattr(args, "debug", False)
    return exit_code_of(lambda: args.execute(args), name=words[0], debug=debug)


def exit_code_of(command: Callable[[], int], *, name: str = "run", debug: bool = False) -> int:
    """Run `command`, typed as `name`; return its exit code, or the one its exception means."""
    try:
        code = command()
        print(end="", flush=True)  # here, where the error of a closed pipe is caught
        return code
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        return _UNREAD
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt.__cause__, UnisonoError):  # of a rank that was to end
            print(_block(interrupt.__cause__), file=sys.stderr)
        print("unisono: interrupted", file=sys.stderr)
        return 130
    except UnisonoError as error:
        if debug:
            traceback.print_exc()
        else:
            print(_block(error), file=sys.stderr)
        match error:
            case PlatformError() | MissingExtra():
                return 2
            case ValueError() if name != "run":  # sizes, meshes and files that do not fit
                return 2
            case RankTimeout():
                return 124
            case _:
                return 1


def _is_unread(output: TextIO) -> bool:
    """Whether nothing reads `output` any more, as after `| head`; drop what it still holds."""
    waiting = select.poll()
    waiting.register(output.fileno(), 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output.fileno())
    os.close(nowhere)
    return True


def _block(error: UnisonoError) -> str:
    """Return the message, with the remote traceback where only the cause has it."""
    parts = [f"unisono: {error}", *getattr(error, "__notes__", ())]
    if isinstance(error.__cause__, RemoteError):
        parts.insert(0, str(error.__cause__).rstrip())
    return "\n".join(parts)


def _check_command(words: list[str], parser: argparse.ArgumentParser) -> None:
    """End with a hint where a command, or an action of one, does not exist."""
    commands, typed = subcommands(parser), [parser.prog]
    for word in words:
        if word.startswith("-") or not commands:
            return
        if word not in commands:
            near = next(iter(difflib.get_close_matches(word, commands, n=1)), None)
            gone = REMOVED.get(" ".join([*typed, word]))
            hint = gone or (f"did you mean {' '.join([*typed, near])}?" if near else "")
            parser.error(
                f"no command {' '.join([*typed, word])}; there are {', '.join(commands)}"
                + (f"\nHINT: {hint}" if hint else "")
            )
        typed.append(word)
        commands = subcommands(commands[word])


def _with_dashes(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words with `--` after a script that is followed by options of its own.

    If only options of ours follow the script, they stay ours; if they are mixed with others, they
    could be meant for either.
    """
    if words[:1] != ["run"] or "--" in words or {"-h", "--help"} & set(words):
        return words
    args, unknown = parser.parse_known_args(words)
    target = args.module or args.target
    if not (unknown or (args.module and args.target)):
        return words
    # The same word may also be the value of an option before: --record train -m train.
    ends = (number for number, word in enumerate(words, 1) if word == target)
    for cut in ends:
        before, unknown = parser.parse_known_args(words[:cut])
        if (before.module or before.target) == target:
            break
    else:
        return words
    if unknown or (before.module and before.target):
        return words  # wrong options before the script, or a script and a module
    options = _options(parser, "run")
    if ours := [word for word in words[cut:] if word.partition("=")[0] in options]:
        parser.error(
            f"{' '.join(words[cut:])} comes after {target}, and {ours[0]} is an option of "
            f"unisono run, too\nHINT: unisono run {ours[0]} ... {target} for unisono; "
            f"unisono run ... {target} -- {' '.join(words[cut:])} for the script"
        )
    return [*words[:cut], "--", *words[cut:]]


def _explanation(
    args: argparse.Namespace,
    unknown: list[str],
    words: list[str],
    parser: argparse.ArgumentParser,
) -> str:
    """Say what was not understood; arguments of a script belong after `--`."""
    text = f"unrecognized arguments: {' '.join(unknown)}"
    word = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
    near = difflib.get_close_matches(word, _options(parser, words[0]), n=1, cutoff=0.8)
    if gone := REMOVED.get(f"{parser.prog} {words[0]} {word}"):
        return f"{text}\nHINT: {gone}"
    if near:
        text += f"\nHINT: did you mean {near[0]}?"
    target = getattr(args, "target", None) or getattr(args, "module", None)
    is_ours = near and target in words and unknown[0] in words[: words.index(target)]
    if args.execute is run.execute and target is not None and not is_ours:
        how = "-m " if args.target is None else ""
        text += f"\nHINT: unisono run ... {how}{target} -- {' '.join(unknown)}"
        text += "  (everything after -- goes to the script)"
    return text


def _options(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Return the long options of a command."""
    commands = subcommands(parser)
    if command not in commands:
        return []
    options = commands[command]._option_string_actions
    return [option for option in options if option.startswith("--")]

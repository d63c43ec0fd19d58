"""How a command ends: its exit code, and one block on stderr when something went wrong.

Messages of the library are shown in the terms of the command line: `--ranks 2` instead of
`ranks=2`.
"""

from __future__ import annotations

import os
import re
import select
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from unisono.errors import MissingExtra, PlatformError, RankTimeout, RemoteError, UnisonoError

OK, FAILED, USAGE, DEADLINE, INTERRUPTED, UNREAD = 0, 1, 2, 124, 130, 141
_OPTIONS = {
    "on": "--on",
    "device": "--on",
    "ranks": "--ranks",
    "rank": "--rank",
    "nodes": "--nodes",
    "n_nodes": "--nodes",
    "n_gpus_per_node": "--gpus",
    "partition": "--partition",
    "timeout_s": "--timeout-s",
    "max_restarts": "--max-restarts",
    "logs": "--logs",
    "console": "--console",
}
_VALUE = r"""(?:"[^"]*"|'[^']*'|\{[^}]*\}|\[[^\]]*\]|[\w./-]+)"""
_CALL = re.compile(r"unisono\.run\(\.\.\., (.*?)\)(?=$| )")
_MADE = re.compile(r"^(?:Platform|Logs)\((.*)\)(?=$| with )")
_WRAPPED = re.compile(r"(?:\bunisono\.)?\b(?:Platform|Logs)\((--[^()]*)\)")
_OF_A_SCRIPT = "Traceback (most recent call last)"
_PAIR = re.compile(rf"(?<![-\w.\[{{\"'])([a-z_]+)=({_VALUE})")


def exit_code_of(command: Callable[[], int], *, name: str = "run", debug: bool = False) -> int:
    """Run `command`, typed as `name`; return its exit code, or the one its exception means."""
    try:
        code = command()
        print(end="", flush=True)  # here, where nobody has to see the error of a closed pipe
        return code
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        return UNREAD
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt.__cause__, UnisonoError):  # of a rank that was to end
            print(_block(interrupt.__cause__, name), file=sys.stderr)
        print("unisono: interrupted", file=sys.stderr)
        return INTERRUPTED
    except UnisonoError as error:
        if debug:
            traceback.print_exc()
        else:
            print(_block(error, name), file=sys.stderr)
        match error:
            case PlatformError() | MissingExtra():
                return USAGE
            case ValueError() if name != "run":  # sizes, meshes and files that do not fit
                return USAGE
            case RankTimeout():
                return DEADLINE
            case _:
                return FAILED


def _is_unread(output: TextIO) -> bool:
    """Whether nobody reads `output` any more, as after `| head`; what it still holds is dropped."""
    waiting = select.poll()
    waiting.register(output.fileno(), 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in waiting.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output.fileno())
    os.close(nowhere)
    return True


def _block(error: UnisonoError, name: str) -> str:
    """Return the message, with the remote traceback where only the cause has it."""
    text = str(error) if _is_of_script(error) else as_typed(str(error), name)
    parts = [f"unisono: {text}", *getattr(error, "__notes__", ())]
    if isinstance(error.__cause__, RemoteError):
        parts.insert(0, str(error.__cause__).rstrip())
    return "\n".join(parts)


def _is_of_script(error: UnisonoError) -> bool:
    """Whether a script that runs in this very process raised it: it knows no options."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "runpy" for frame, _ in frames)


def as_typed(message: str, command: str = "run") -> str:
    """Return a message with what was asked, and its hints, as they are typed in a shell.

    `command` is the one that was typed; others than `run` check places and ranks as it does.

    Example:
        >>> as_typed("unisono.run(..., ranks=0)")
        'unisono run --ranks 0'
    """
    first, *rest = message.split("\n")
    if _OF_A_SCRIPT in message:  # what the script did keeps its own words
        return "\n".join([first, *(_pairs(x) if x.startswith("HINT:") else x for x in rest)])
    lines = [_asked(first, command)]
    lines += [_pairs(line) if line.lstrip().startswith("HINT:") else line for line in rest]
    return "\n".join(lines)


def _asked(line: str, command: str) -> str:
    if (call := _CALL.search(line)) is not None:
        return f"{line[: call.start()]}unisono {command} {_pairs(call[1])}{line[call.end() :]}"
    if (made := _MADE.search(line)) is not None:
        return f"{_pairs(made[1])}{line[made.end() :]}"
    return line


def _pairs(text: str) -> str:
    text = text.replace("a longer timeout_s", "a longer --timeout-s")
    text = _WRAPPED.sub(r"\1", _PAIR.sub(_option, text))
    return re.sub(r", (?=--)", " ", text)


def _option(pair: re.Match[str]) -> str:
    from unisono.launch.platform import FIELDS

    name, value = pair[1], pair[2]
    plain = value[1:-1] if value[0] in "\"'" else f"'{value}'" if value[0] in "{[" else value
    if name in _OPTIONS:
        return f"{_OPTIONS[name]} {plain.strip(chr(39))}"
    if name in FIELDS:
        return f"--set {name}={plain}"
    return pair[0]

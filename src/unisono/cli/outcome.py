"""How a command ends: its exit code, and one block on stderr when something went wrong.

`SHELL` spells the options of `unisono run` in errors that the library raises.
"""

from __future__ import annotations

import os
import select
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from unisono.errors import (
    MissingExtra,
    PlatformError,
    RankTimeout,
    RemoteError,
    Spelling,
    UnisonoError,
)

OK, FAILED, USAGE, DEADLINE, INTERRUPTED, UNREAD = 0, 1, 2, 124, 130, 141


class ShellSpelling(Spelling):
    """Arguments as they are typed in a shell: options of a command.

    Args:
        command: the command that was typed; others than `run` check places and ranks as it does.
    """

    _OPTIONS: Mapping[str, str] = {
        "device": "--on",
        "n_nodes": "--nodes",
        "n_gpus_per_node": "--gpus",
        **{
            name: f"--{name.replace('_', '-')}"
            for name in (
                *("on", "ranks", "rank", "nodes", "partition", "timeout_s", "max_restarts"),
                *("logs", "console", "hosts"),
            )
        },
    }
    _FLAGS = ("elastic", "check", "detach")

    def __init__(self, command: str = "run") -> None:
        self._command = command

    def options(self, **values: Any) -> str:
        """Return options side by side.

        Example:
            >>> SHELL.options(ranks=2, hosts=["a", "b"], seed=1)
            '--ranks 2 --hosts a,b --set seed=1'
            >>> SHELL.options(ranks=(2, 8), elastic=True)
            '--ranks 2:8 --elastic'
        """
        words: list[str] = []
        for name, value in values.items():
            if name in self._FLAGS:
                words += [f"--{name}"] if value else []
            elif name in self._OPTIONS:
                is_list = isinstance(value, (list, tuple))
                between = ":" if name == "ranks" else ","
                text = between.join(map(str, value)) if is_list else str(value)
                words += [self._OPTIONS[name], shlex.quote(text)]
            else:
                words += ["--set", shlex.quote(f"{name}={_toml(value)}")]
        return " ".join(words)

    def run(self, **values: Any) -> str:
        """Return the command with these options."""
        return f"unisono {self._command} {self.options(**values)}"

    platform = run


def _toml(value: Any) -> str:
    """Return a value as `--set` reads it."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return f"{{{', '.join(f'{name} = {_quoted(v)}' for name, v in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(_quoted, value))}]"
        case _:
            return str(value)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else _toml(value)


SHELL = ShellSpelling()


def exit_code_of(command: Callable[[], int], *, name: str = "run", debug: bool = False) -> int:
    """Run `command`, typed as `name`; return its exit code, or the one its exception means."""
    try:
        code = command()
        print(end="", flush=True)  # here, where the error of a closed pipe is caught
        return code
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        return UNREAD
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt.__cause__, UnisonoError):  # of a rank that was to end
            print(_block(interrupt.__cause__), file=sys.stderr)
        print("unisono: interrupted", file=sys.stderr)
        return INTERRUPTED
    except UnisonoError as error:
        if debug:
            traceback.print_exc()
        else:
            print(_block(error), file=sys.stderr)
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

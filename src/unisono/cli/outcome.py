"""How a command ends: its exit code, and one block on stderr when something went wrong."""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from unisono.cli.wording import as_typed
from unisono.errors import MissingExtra, PlatformError, RankTimeout, RemoteError, UnisonoError

OK, FAILED, USAGE, DEADLINE, INTERRUPTED, UNREAD = 0, 1, 2, 124, 130, 141


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

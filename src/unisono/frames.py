"""Whose code a frame is, and stacks with other people's frames folded.

No torch here. `comm` shows the stacks of a late rank in this form, the launcher those of a run.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

Frame = tuple[str, int, str]
"""File, line and function of a call."""
_OF_COMMAND = "<string>"
"""The file of code that was given by `python -c`."""

_OWN = f"{Path(__file__).resolve().parent}{os.sep}"
_SHIPPED = (f"{_OWN}_examples", f"{_OWN}_benchmarks", f"{_OWN}cli{os.sep}demo_digits.py")
"""Programs that an installed package carries along: users run them as they run their own."""
_STDLIB = tuple(
    f"{Path(sysconfig.get_path(key)).resolve()}{os.sep}" for key in ("stdlib", "platstdlib")
)
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of packages, which need not be those of this environment: it may add to another one."""
_BETWEEN = re.compile(
    r"^<frozen runpy>$|/(?:site|dist)-packages/torch/"
    r"(?:nn/modules/module|_dynamo/eval_frame|_tensor|autograd/\w+|utils/_contextlib"
    r"|distributed/c10d_logger)\.py$"
)
"""What calls a user's function on behalf of Python or torch, and says nothing about it."""
_NO_FRAMES = "  in a function that is not written in Python"


def is_user_file(file: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor of an installed package."""
    if file.startswith("<"):
        return not file.startswith("<frozen")
    path = Path(file).resolve()
    is_installed = not _INSTALLED.isdisjoint(path.parts) or str(path).startswith((_OWN, *_STDLIB))
    return not is_installed or str(path).startswith(_SHIPPED)


def is_own_file(file: str) -> bool:
    """Whether a file is part of unisono, and no example in it."""
    return file.startswith(_OWN) and not file.startswith(_SHIPPED)


def is_between(file: str) -> bool:
    """Whether a file is ours, or only passes calls on to functions of the user's.

    >>> is_between("/env/site-packages/torch/nn/modules/module.py"), is_between("/me/net.py")
    (True, False)
    """
    return is_own_file(file) or _BETWEEN.search(file) is not None


def owner_of(file: str) -> str:
    """Return the package that a file of no user belongs to."""
    parts = Path(file).parts
    for at, folder in enumerate(parts[:-1]):
        if folder in _INSTALLED:
            return parts[at + 1].removesuffix(".py")
    return "unisono" if is_own_file(file) else "Python"


def folded(frames: Sequence[Frame]) -> str:
    """Return a stack, the innermost call first: the user's lines, other calls as one line a run.

    What started the user's function, at the outer end, is left out. So is the number of calls that
    one line stands for: stacks of ranks at the same place are equal.

    >>> folded([("/env/site-packages/torch/a.py", 2, "g"), ("/me/no.py", 7, "f")]).splitlines()
    ['  ... in torch', '  File "/me/no.py", line 7 in f']
    """
    frames = _without_launcher(frames)
    if not any(is_user_file(file) for file, _, _ in frames):
        return "\n".join(map(_shown, frames[:1])) or _NO_FRAMES
    lines: list[str] = []
    for is_user, run in groupby(frames, lambda frame: is_user_file(frame[0])):
        calls = list(run)
        if is_user:
            lines += map(_shown, calls)
        else:
            owners = dict.fromkeys(owner_of(file) for file, _, _ in calls)
            lines.append(f"  ... in {', '.join(owners)}")
    return "\n".join(lines)


def _without_launcher(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Leave out the calls below the user's function, and the command of a process of ours."""
    end = len(frames)
    if end > 1 and frames[-1] == (_OF_COMMAND, 1, "<module>") and not is_user_file(frames[-2][0]):
        end -= 1
    has_user = any(is_user_file(file) for file, _, _ in frames[:end])
    while has_user and not is_user_file(frames[end - 1][0]):
        end -= 1
    return frames[:end]


def _shown(frame: Frame) -> str:
    file, number, function = frame
    source = linecache.getline(file, number).strip()
    return f'  File "{file}", line {number} in {function}{source and f": `{source}`"}'

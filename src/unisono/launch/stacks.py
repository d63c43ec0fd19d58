"""Reading what `faulthandler` wrote about a rank: its threads, and where the user's code stands."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import name_ranks

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_BOTTOM = re.compile(
    r'(?:^\s*File "[^"]*unisono/launch/(?:rank|server|conventions)\.py", line \d+ in \w+\n)+'
    r'^\s*File "<string>", line 1 in <module>\n?',
    re.MULTILINE,
)
"""The frames below the user's function, the same in every rank."""
_CRASH = "Fatal Python error: "
_PACKAGE = str(Path(__file__).resolve().parents[1])
_OWN_THREADS = ("launch/lifeline.py", "comm/watchdog.py")
_LIBRARIES = tuple(
    str(Path(path).resolve())
    for key in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(key))
)


def user_threads(dump: str) -> str:
    """Return `dump` without unisono's own threads and the frames below the function."""
    dump = _BOTTOM.sub("", dump)
    starts = [match.start() for match in _THREAD.finditer(dump)]
    if not starts:
        return dump.strip()
    blocks = [dump[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    kept = [block for block in blocks if not any(own in block for own in _OWN_THREADS)]
    return "\n\n".join(map(_with_frames, kept or blocks))


def _with_frames(block: str) -> str:
    """Return the stack of a thread; one that has no frame of its own says so."""
    return block if "\n" in block else f"{block}\n  in a function that is not written in Python"


def crash_in(path: Path) -> str:
    """Return where a rank stood when it crashed, by the file of its stacks; nothing if it did not.

    The interpreter writes it there itself when a native library makes an error that ends it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    _, found, dump = text.rpartition(_CRASH)
    return user_threads(dump) if found else ""


def user_line(dump: str) -> str:
    """Return the innermost line of the user's own code, as `file.py:12 in step`.

    The main thread comes last in a dump, so it is looked at first.
    """
    blocks = re.split(r"\n\s*\n", user_threads(dump))
    fallback = ""
    for block in reversed(blocks):
        for text in block.splitlines():
            frame = _FRAME.match(text)
            if frame is None:
                continue
            place = f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}"
            fallback = fallback or place
            if is_user_file(frame["file"]):
                return place
    return fallback or "no Python code"


def is_user_file(file: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor of an installed package."""
    if file.startswith("<frozen"):
        return False
    path = str(Path(file).resolve()) if not file.startswith("<") else file
    return not path.startswith((_PACKAGE, *_LIBRARIES))


def site_of(error: BaseException) -> str:
    """Return the innermost line of the user's code that `error` passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return ""


def grouped(stacks: Mapping[int, str], first: int | None = None) -> str:
    """Write the stacks of several ranks; equal ones once, those of rank `first` at the top."""
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(stacks, key=lambda r: (r != first, r)):
        # Thread numbers differ between processes that stand at the same place.
        text = re.sub(r"0x[0-9a-f]{8,}", "0x...", stacks[rank])
        ranks_of.setdefault(text, []).append(rank)
    return "\n".join(f"--- {name_ranks(ranks)}\n{text}" for text, ranks in ranks_of.items())


def outside_collectives(stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks whose stacks show no call that waits for other ranks."""
    return [
        rank
        for rank, text in stacks.items()
        if "torch/distributed/" not in text and "unisono/comm/" not in text
    ]

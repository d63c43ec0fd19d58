"""Stacks and tracebacks as users see them: their own frames, unisono's folded.

Also reads what `faulthandler` wrote about a rank: its threads, and where the user's code stands.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from types import TracebackType

from unisono.errors import UnisonoError, name_ranks

FRAMES = "UNISONO_FRAMES"
"""`all` in this variable shows our own frames in every traceback."""

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
_SHIPPED = tuple(str(Path(_PACKAGE, name)) for name in ("_examples", "_benchmarks"))
"""Programs that an installed package carries along: users run them as they run their own."""
_FOLDED = "<frames of unisono>"
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


def is_own_file(file: str) -> bool:
    """Whether a file is part of unisono, and no example in it."""
    return file.startswith(_PACKAGE + os.sep) and not file.startswith(_SHIPPED)


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, and of what led to it, with frames of ours folded."""
    told = traceback.TracebackException.from_exception(error)
    if os.environ.get(FRAMES) != "all":
        _fold(told, error)
    return "".join(told.format())


def _fold(told: traceback.TracebackException, error: BaseException) -> None:
    """Replace each run of our own frames by a line; the launcher's, at the outer end, by none."""
    kept = _Folding()
    is_outermost = True
    for is_own, frames in groupby(told.stack, lambda frame: is_own_file(frame.filename)):
        run = list(frames)
        if is_own and not is_outermost:
            # Where it was not us who raised on purpose, the place in our code helps.
            is_odd = run[-1] is told.stack[-1] and not isinstance(error, UnisonoError)
            hidden = len(run) - is_odd
            if hidden:
                words = f"{hidden} frame{'s' if hidden > 1 else ''} of unisono"
                words = f"... {words} ({FRAMES}=all shows them)"
                kept.append(traceback.FrameSummary(_FOLDED, len(kept), words, line=""))
            run = run[hidden:]
        elif is_own:
            run = []
        kept += run
        is_outermost = False
    told.stack = kept
    for inner, cause in (
        (told.__cause__, error.__cause__),
        (told.__context__, error.__context__),
        *zip(told.exceptions or (), getattr(error, "exceptions", ()), strict=False),
    ):
        if inner is not None and cause is not None:
            _fold(inner, cause)


class _Folding(traceback.StackSummary):
    """Frames, some of which stand for others."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: bool) -> str:
        """Return the lines of a frame."""
        if frame_summary.filename == _FOLDED:
            return f"  {frame_summary.name}\n"
        return super().format_frame_summary(frame_summary, **options)


class own_frames_hidden:
    """Let errors leave the block without frames of ours, so that the user's line stands last.

    A class and not a generator: what `__exit__` leaves in the error's traceback is what is raised.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if error is not None:
            hide_own_frames(error)


def hide_own_frames(error: BaseException) -> None:
    """Take frames of ours out of an error's traceback; the innermost stays if we did not raise."""
    if os.environ.get(FRAMES) == "all":
        return
    kept: list[TracebackType] = []
    frames = error.__traceback__
    while frames is not None:
        is_odd = frames.tb_next is None and not isinstance(error, UnisonoError)
        if is_odd or not is_own_file(frames.tb_frame.f_code.co_filename):
            kept.append(frames)
        frames = frames.tb_next
    for one in reversed(kept):
        frames = TracebackType(frames, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = frames


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

"""Stacks and tracebacks as users see them: their own frames, unisono's folded.

Also reads what `faulthandler` wrote about a rank: its threads, and where the user's code stands.
"""

from __future__ import annotations

import linecache
import os
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType

from unisono.errors import UnisonoError
from unisono.frames import folded, is_between, is_own_file, is_user_file, owner_of
from unisono.launch.logs import size_of, text_from

FRAMES = "UNISONO_FRAMES"
"""`all` in this variable shows our own frames in every traceback."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])?.*:$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_BOTTOM = re.compile(
    r'^\s*File "(?:<string>", line 1 in <module>$|[^"]*unisono/(?:launch/pool/(?:rank|server)'
    r'|launch/tasks|testing/rank)\.py", line \d+ in )'
)
"""The frames below the user's function, the same in every rank."""
_OWN_THREADS = re.compile(
    r'unisono/(?:launch/pool/rank\.py", line \d+ in _read_orders|comm/(?:\w+/)*watchdog\.py)'
)
"""Threads of ours, which always wait."""
_CRASH = "Fatal Python error: "
_NO_FRAMES = "  in a function that is not written in Python"
_FOLDED = "<frames of unisono>"
ANSWER_S = 2.0
"""Longest wait for the stacks of ranks that another process supervises."""
_SETTLED_S = 0.15
"""So long nothing is added to a dump that is whole; a busy machine pauses between threads."""


@dataclass
class _Thread:
    """The stack of one thread as `faulthandler` writes it, the innermost call first."""

    title: str
    lines: list[str]

    @property
    def text(self) -> str:
        """The stack; one without a frame says why."""
        lines = self.lines or [_NO_FRAMES]
        return "\n".join([self.title, *lines]).strip()

    def frames(self) -> Iterator[tuple[str, int, str]]:
        """Yield file, line and function of each call."""
        for text in self.lines:
            if (frame := _FRAME.match(text)) is not None:
                yield frame["file"], int(frame["line"]), frame["function"]


def _parsed(dump: str) -> tuple[list[str], list[_Thread]]:
    """Return what stands before the threads of a dump, and the threads that are not ours.

    The frames below the user's function are left out.
    """
    before: list[str] = []
    threads: list[_Thread] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append(_Thread(line, []))
        elif line.strip():
            (threads[-1].lines if threads else before).append(line)
    kept = [t for t in threads if not any(_OWN_THREADS.search(line) for line in t.lines)]
    for lines in (before, *(thread.lines for thread in kept or threads)):
        # After a crash, the interpreter's list of extension modules follows the last frame.
        end = max((i + 1 for i, line in enumerate(lines) if _FRAME.match(line)), default=0)
        while end and _BOTTOM.match(lines[end - 1]):
            end -= 1
            del lines[end]
    return before, kept or threads


def user_threads(dump: str) -> str:
    """Return `dump` without unisono's own threads and the frames below the function."""
    before, threads = _parsed(dump)
    return "\n\n".join(thread.text for thread in threads) or "\n".join(before).strip()


def readable_threads(dump: str) -> str:
    """Return a dump as tracebacks: with source lines, most recent call last, main thread first.

    >>> print(
    ...     readable_threads('  File "a.py", line 2 in g' + chr(10) + '  File "a.py", line 7 in f')
    ... )
      File "a.py", line 7, in f
      File "a.py", line 2, in g
    """
    before, threads = _parsed(dump)
    words = [line for line in before if not _FRAME.match(line)]
    sections = [*words, *_as_traceback(_Thread("", before))]
    for thread in sorted(threads, key=lambda thread: not thread.title.startswith("Current")):
        name = _THREAD.match(thread.title)
        where = f"thread {(name and name['name']) or '(unnamed)'}"
        where = "the main thread" if thread.title.startswith("Current") else where
        sections += [f"in {where} (most recent call last):", *_as_traceback(thread)]
    return "\n".join(sections)


def _as_traceback(thread: _Thread) -> list[str]:
    lines: list[str] = []
    for file, number, function in reversed(list(thread.frames())):
        lines.append(f'  File "{file}", line {number}, in {function}')
        if source := linecache.getline(file, number).strip():
            lines.append(f"    {source}")
    return lines


def folded_threads(dump: str) -> str:
    """Return a dump for an error: the user's lines with their source, runs of others as one line.

    The innermost call comes first, and the main thread.
    """
    before, threads = _parsed(dump)
    lines: list[str] = []
    for thread in reversed(threads or [_Thread("", before)]):
        if len(threads) > 1 and not thread.title.startswith("Current"):
            name = _THREAD.match(thread.title)
            lines.append(f"  in thread {(name and name['name']) or '(unnamed)'}:")
        lines.append(folded(list(thread.frames())))
    return "\n".join(lines)


class StackDumps:
    """New text in the files to which ranks write their stacks. Make it before the signal.

    Args:
        paths: the file of each rank.
    """

    def __init__(self, paths: Mapping[int, Path]) -> None:
        self._paths = paths
        self._begin = {rank: size_of(path) for rank, path in paths.items()}
        self._sizes = self._begin
        self._changed_at = time.monotonic()

    def are_whole(self) -> bool:
        """Whether all have answered, and nothing was added for a while."""
        sizes = {rank: size_of(path) for rank, path in self._paths.items()}
        if sizes != self._sizes:
            self._sizes, self._changed_at = sizes, time.monotonic()
        has_grown = all(sizes[rank] > begin for rank, begin in self._begin.items())
        return has_grown and time.monotonic() - self._changed_at >= _SETTLED_S

    def texts(self) -> dict[int, str]:
        """Return the new text, by rank."""
        texts = {r: text_from(path, self._begin[r]) for r, path in self._paths.items()}
        return {rank: text for rank, text in texts.items() if text}


def crash_in(path: Path) -> str:
    """Return where a rank stood when it crashed, by the file of its stacks; nothing if it did not.

    The interpreter writes it there itself when a native library makes an error that ends it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    _, mark, dump = text.rpartition(_CRASH)
    return user_threads(dump) if mark else ""


def user_line(dump: str) -> str:
    """Return the innermost line of the user's own code, as `file.py:12 in step`.

    The main thread comes last in a dump, so it is looked at first.
    """
    before, threads = _parsed(dump)
    fallback = ""
    for thread in (*reversed(threads), _Thread("", before)):
        for file, number, function in thread.frames():
            place = f"{Path(file).name}:{number} in {function}"
            fallback = fallback or place
            if is_user_file(file):
                return place
    return fallback or "no Python code"


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, and of what led to it, with frames of ours folded."""
    formatted = traceback.TracebackException.from_exception(error)
    if os.environ.get(FRAMES) != "all":
        for one, its_error in chain_of(formatted, error):
            one.stack = _folded(one.stack, its_error)
    return "".join(formatted.format())


def chain_of(
    formatted: traceback.TracebackException, error: BaseException
) -> Iterator[tuple[traceback.TracebackException, BaseException]]:
    """Yield an error that is about to be shown, and all that are shown with it as its causes."""
    yield formatted, error
    for inner, cause in (
        (formatted.__cause__, error.__cause__),
        (formatted.__context__, error.__context__),
        *zip(formatted.exceptions or (), getattr(error, "exceptions", ()), strict=False),
    ):
        if inner is not None and cause is not None:
            yield from chain_of(inner, cause)


def _folded(stack: traceback.StackSummary, error: BaseException) -> traceback.StackSummary:
    """Replace frames between the user's by a line; the launcher's, at the outer end, by none."""
    kept = _Folding()
    is_outermost = True
    for is_folded, frames in groupby(stack, lambda frame: is_between(frame.filename)):
        run = list(frames)
        if is_folded and not is_outermost:
            # Where it was not us who raised on purpose, the place in our code helps.
            is_odd = run[-1] is stack[-1] and not isinstance(error, UnisonoError)
            hidden = len(run) - is_odd
            if hidden:
                owners = dict.fromkeys(owner_of(frame.filename) for frame in run[:hidden])
                words = f"{hidden} frame{'s' if hidden > 1 else ''} of {' and '.join(owners)}"
                words = f"... {words} ({FRAMES}=all shows them)"
                kept.append(traceback.FrameSummary(_FOLDED, len(kept), words, line=""))
            run = run[hidden:]
        elif is_folded:
            run = []
        kept += run
        is_outermost = False
    return kept


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


def outside_collectives(stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks whose stacks show no call that waits for other ranks."""
    return [
        rank
        for rank, text in stacks.items()
        if "torch/distributed/" not in text and "unisono/comm/" not in text
    ]

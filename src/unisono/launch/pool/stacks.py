"""Stacks and tracebacks as users see them: their own frames, unisono's folded.

Also reads what `faulthandler` wrote about a rank: its threads, and where the user's code stands.
"""

from __future__ import annotations

import functools
import os
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from unisono.errors import UnisonoError
from unisono.frames import Frame, folded, is_between, is_own_file, is_user_file, owner_of
from unisono.launch.logs import size_of, text_from

FRAMES = "UNISONO_FRAMES"
"""`all` in this variable shows our own frames in every traceback."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])?.*:$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_BOTTOM = re.compile(
    r"unisono/(?:launch/(?:tasks|pool/rank|pool/server)|testing/rank)\.py:|<string>:<module>$"
)
"""Files, and functions, of frames below the user's function, the same in every rank."""
_OWN_THREADS = re.compile(
    r"unisono/(?:launch/pool/rank\.py:_read_orders|comm/(?:\w+/)*watchdog\.py)"
)
"""Those of threads of ours, which always wait."""
_CRASH = "Fatal Python error: "
_NO_FRAMES = "  in a function that is not written in Python"
_FOLDED = "<frames of unisono>"
ANSWER_S = 2.0
"""Longest wait for the stacks of ranks that another process supervises."""
_SETTLED_S = 0.15
"""So long nothing is added to a dump that is whole; a busy machine pauses between threads."""


class _Thread(NamedTuple):
    """The stack of one thread as `faulthandler` writes it, the innermost call first."""

    title: str
    frames: list[Frame]

    def __str__(self) -> str:
        lines = [f'  File "{file}", line {line} in {name}' for file, line, name in self.frames]
        return "\n".join([self.title, *(lines or [_NO_FRAMES])]).strip("\n")


def _threads(dump: str) -> list[_Thread]:
    """Return the threads of a dump that are not ours, without frames below the user's function."""
    threads = [_Thread("", [])]
    for text in dump.splitlines():
        if _THREAD.match(text):
            threads.append(_Thread(text, []))
        elif (frame := _FRAME.match(text)) is not None:
            threads[-1].frames.append((frame["file"], int(frame["line"]), frame["function"]))
    threads = [thread for thread in threads if thread.title or thread.frames]
    others = [t for t in threads if not any(map(functools.partial(_is, _OWN_THREADS), t.frames))]
    for thread in others:
        while thread.frames and _is(_BOTTOM, thread.frames[-1]):
            thread.frames.pop()
    return others or threads


def _is(pattern: re.Pattern[str], frame: Frame) -> bool:
    return pattern.search(f"{frame[0]}:{frame[2]}") is not None


def user_threads(dump: str) -> str:
    """Return `dump` without unisono's own threads and the frames below the function."""
    return "\n\n".join(map(str, _threads(dump)))


def folded_threads(dump: str) -> str:
    """Return a dump for an error: the user's lines with their source, runs of others as one line.

    The innermost call comes first, and the main thread. Of a crash, what Python says opens it.
    """
    threads, lines = _threads(dump), [x for x in dump.splitlines() if x.startswith(_CRASH)]
    for thread in reversed(threads):
        if len(threads) > 1 and not thread.title.startswith("Current"):
            name = _THREAD.match(thread.title)
            lines.append(f"  in thread {(name and name['name']) or '(unnamed)'}:")
        lines.append(folded(thread.frames))
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
    frames = [frame for thread in reversed(_threads(dump)) for frame in thread.frames]
    of_user = [frame for frame in frames if is_user_file(frame[0])]
    for file, number, function in of_user or frames:
        return f"{Path(file).name}:{number} in {function}"
    return "no Python code"


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
    for is_folded, frames in groupby(stack, lambda frame: is_between(frame.filename)):
        run = list(frames)
        if is_folded and run[0] is stack[0]:
            continue
        if is_folded:
            # Where it was not us who raised on purpose, the place in our code helps.
            is_odd = run[-1] is stack[-1] and not isinstance(error, UnisonoError)
            hidden, run = run[: len(run) - is_odd], run[len(run) - is_odd :]
            if hidden:
                owners = dict.fromkeys(owner_of(frame.filename) for frame in hidden)
                words = f"{len(hidden)} frame{'s' if len(hidden) > 1 else ''} of "
                words = f"... {words}{' and '.join(owners)} ({FRAMES}=all shows them)"
                kept.append(traceback.FrameSummary(_FOLDED, len(kept), words, line=""))
        kept += run
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

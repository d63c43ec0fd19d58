"""Output of ranks: whole lines on one console, each with its rank in front, and a log of each.

Lines are never mixed. A progress bar (text that ends in a carriage return, or has no end yet and
began with one) is shown from rank 0 on a terminal or in a notebook, and redrawn below lines of
other ranks; elsewhere only its last state appears, as a line.

One rank may have the terminal: `UNISONO_STDIN_RANK=0` gives rank 0 the launcher's standard input.
So `breakpoint()` works in that rank, and the others skip theirs. Ranks without a terminal have an
empty standard input.
"""

from __future__ import annotations

import codecs
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, TextIO

from unisono.errors import PYTHON, PlatformError, Spelling, an
from unisono.expect import expect, expect_int

__all__ = ["IO", "Logs", "checked_logs"]

SHOW_ALL_UP_TO = 8
"""Largest world of which the console `auto` shows every rank."""
FAILED = b"--- failed, with this traceback:\n"
"""The line of a log after which the traceback of the rank follows."""
STDIN_VARIABLE = "UNISONO_STDIN_RANK"
_STDIN = 0
_PACKAGE = str(Path(__file__).resolve().parents[1])
_CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What to do with the output of the ranks."""

    dir: str | Path | None = None
    """Parent of the run's directory, which is then kept. None: a private temporary directory that
    is removed on success and kept, and named in the error, on failure."""
    console: Literal["auto", "all", "rank0", "none"] | Sequence[int] = "auto"
    """Ranks shown on the console; `auto` is all of them up to 8 ranks, else rank 0."""
    prefix: bool = True
    """Whether each line starts with `[rank] ` in a world of more than one rank."""

    def shown(self, ranks: int) -> frozenset[int]:
        """Return which of `ranks` ranks the console shows."""
        match self.console:
            case "auto":
                return frozenset(range(ranks if ranks <= SHOW_ALL_UP_TO else 1))
            case "all":
                return frozenset(range(ranks))
            case "rank0":
                return frozenset({0})
            case "none":
                return frozenset()
            case chosen:
                return frozenset(chosen)


def checked_logs(logs: str | Path | Logs | None, ranks: int, spelling: Spelling = PYTHON) -> Logs:
    """Return `logs` as a `Logs`, or raise `PlatformError` if it makes no sense for `ranks`."""
    if logs is None or isinstance(logs, (str, Path)):
        return Logs(dir=logs)
    if not isinstance(logs, Logs):
        raise PlatformError.because(
            spelling.run(logs=logs),
            an(type(logs).__name__),
            None,
            'logs="runs" for a directory, or logs=unisono.Logs(console="rank0")',
        )
    console = logs.console
    if isinstance(console, str):
        choices = ("auto", "all", "rank0", "none")
        if console not in choices:
            listed = ", ".join(map(repr, choices))
            raise PlatformError.because(
                spelling.run(console=console), hint=f"one of {listed}, or a list of ranks"
            )
    else:
        expect(
            "Logs.console", console, (str, Collection), 'Logs(console="all"), or a list of ranks'
        )
        for rank in console:
            expect_int("a rank in Logs.console", rank, 0, ranks, error=PlatformError)
    return logs


class Console:
    """Writes what the ranks print to this process's stdout and stderr.

    Attributes:
        raw_rank: the rank that reads our standard input, if one does; shown as it prints.
    """

    def __init__(
        self,
        shown: Collection[int],
        *,
        prefix: bool,
        raw_rank: int | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._shown = frozenset(shown)
        self._prefix = prefix
        self.raw_rank = raw_rank
        self._files = (stdout or sys.stdout, stderr or sys.stderr)
        self._bar = ""
        self._bar_file: TextIO | None = None

    def stream(self, rank: int, number: int) -> RankStream:
        """Return the reader of output `number` (0 stdout, 1 stderr) of `rank`."""
        return RankStream(self, rank, self._files[number], is_raw=rank == self.raw_rank)

    def shows(self, rank: int) -> bool:
        """Whether output of `rank` appears here."""
        return rank in self._shown or rank == self.raw_rank

    @property
    def shows_any(self) -> bool:
        """Whether output of any rank appears here."""
        return bool(self._shown) or self.raw_rank is not None

    def write(self, text: str, file: TextIO | None) -> None:
        """Write text; characters that the encoding of the file lacks are replaced."""
        if file is None:  # as a process without streams has it: `print` does nothing, too
            return
        encoding = getattr(file, "encoding", None) or "utf-8"
        file.write(text.encode(encoding, errors="replace").decode(encoding))
        file.flush()

    def width(self) -> int | None:
        """Return how many columns a progress bar may take; None without a terminal."""
        file = self._files[1]
        if not _is_terminal(file):
            return None
        return shutil.get_terminal_size().columns - (len("[0] ") if self._prefix else 0)

    def line(self, rank: int, text: str, file: TextIO, *, ends_bar: bool = False) -> None:
        """Show one whole line of `rank`, which may be the last state of its progress bar."""
        if rank not in self._shown:
            return
        bar, bar_file = self._bar, self._bar_file
        if bar and bar_file is not None:
            self.write(self._cleared(bar_file), bar_file)
            self._bar = ""
        self.write(f"{self._label(rank)}{text}\n", file)
        if bar and bar_file is not None and not (ends_bar and rank == 0):
            self._draw_bar(bar, bar_file)

    def bar(self, rank: int, text: str, file: TextIO) -> None:
        """Show the present state of a progress bar of rank 0."""
        if rank == 0 and rank in self._shown and (_is_terminal(file) or _is_notebook(file)):
            self._draw_bar(self._label(rank) + text, file)

    def _draw_bar(self, text: str, file: TextIO) -> None:
        cleared = self._cleared(file)
        self._bar, self._bar_file = text, file
        self.write(cleared + text, file)

    def _cleared(self, file: TextIO) -> str:
        """Return the characters that clear the bar: notebooks know the carriage return only."""
        if not _is_notebook(file):
            return _CLEAR_LINE
        return f"\r{' ' * len(self._bar)}\r" if self._bar else "\r"

    def _label(self, rank: int) -> str:
        return f"[{rank}] " if self._prefix else ""


class RankStream:
    """Splits one output of one rank into lines."""

    def __init__(self, console: Console, rank: int, file: TextIO, *, is_raw: bool = False) -> None:
        self._console = console
        self._rank = rank
        self._file = file
        self._is_raw = is_raw
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""

    def feed(self, data: bytes) -> None:
        """Process new bytes."""
        if not self._console.shows(self._rank):
            return
        if self._is_raw:
            self._console.write(self._decode(data), self._file)  # its prompts have no end
            return
        *lines, self._rest = (self._rest + self._decode(data)).split("\n")
        for line in lines:
            self._show(line)
        if "\r" in self._rest:
            state = _last_state(self._rest)
            # What came before the newest state is overwritten on a screen: forget it.
            self._rest = "\r" + state
            self._console.bar(self._rank, state, self._file)

    def close(self) -> None:
        """Show a last line that has no end."""
        rest, self._rest = self._rest + self._decode(b"", True), ""
        if _last_state(rest):
            self._show(rest)

    def _show(self, line: str) -> None:
        ends_bar = "\r" in line
        self._console.line(self._rank, _last_state(line), self._file, ends_bar=ends_bar)


def _last_state(text: str) -> str:
    """Return what a terminal would show of `text`: what follows the last carriage return."""
    return text.rstrip("\r").rpartition("\r")[2]


def _is_terminal(file: TextIO) -> bool:
    isatty = getattr(file, "isatty", None)
    return bool(isatty and isatty())


def _is_notebook(file: TextIO) -> bool:
    """Whether a file shows what is written to it below a cell."""
    return type(file).__module__.partition(".")[0] in ("ipykernel", "google")


class RankLog:
    """The log of one rank. A full disk does not end the run: the rest of the log is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_warned = False
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, data: bytes) -> None:
        """Add `data`; warn once where that fails."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warn(f"{self.path} takes no more output ({error.strerror}); the run goes on")

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class LogReader:
    """Reads what is new in a log.

    Args:
        path: the log, which need not be there yet.
        tail: number of existing lines to read; None reads all of them.
    """

    def __init__(self, path: Path, *, tail: int | None = None) -> None:
        self._path = path
        self._place = 0
        if tail is not None and path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            self._place = sum(map(len, lines[: max(0, len(lines) - tail)]))

    def new(self) -> bytes:
        """Return the bytes that are new."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
            self._place += len(data)
            return data
        return b""


def size_of(path: Path) -> int:
    """Return how long a file is; 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def text_from(path: Path, offset: int = 0) -> str:
    """Return the text of a file from a place on, which may be counted from its end.

    Nothing if it is not there.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset if offset >= 0 else max(0, os.fstat(file.fileno()).st_size + offset))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def tail(path: Path, limit: int = 1 << 20) -> str:
    """Return the text of a log, or the last `limit` bytes of it; nothing if it is not there."""
    return text_from(path, -limit)


def stdin_rank(environment: Mapping[str, str], ranks: int) -> int | None:
    """Return the rank that gets the standard input, if one does."""
    text = environment.get(STDIN_VARIABLE)
    if not text:
        return None
    if not text.isdigit() or int(text) >= ranks:
        raise PlatformError.because(
            f"{STDIN_VARIABLE}={text}",
            "not a rank of this run",
            f"ranks of a world of {ranks} are 0 to {ranks - 1}",
            f"{STDIN_VARIABLE}=0",
        )
    return int(text)


@contextmanager
def lent_to(pid: int | None) -> Iterator[None]:
    """Let the process group `pid` read from our terminal, if there is one, inside the block."""
    if pid is None or not os.isatty(_STDIN):
        yield
        return
    _set_foreground(pid)
    try:
        yield
    finally:
        _set_foreground(os.getpgrp())


def _set_foreground(group: int) -> None:
    """Make `group` the foreground group of the terminal, also from the background."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        with suppress(OSError):
            os.tcsetpgrp(_STDIN, group)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settle(rank: int) -> None:
    """Set up standard input and `breakpoint` in a rank, by who has the terminal."""
    if os.environ.get(STDIN_VARIABLE) == str(rank):
        sys.stdin = sys.__stdin__ = open(_STDIN, closefd=False)  # noqa: SIM115
    elif os.environ.get(STDIN_VARIABLE):
        sys.breakpointhook = _pass_breakpoint
    else:
        sys.breakpointhook = _refuse_breakpoint


def _pass_breakpoint(*_args: object, **_kwargs: object) -> None:
    """Skip a breakpoint: another rank has the terminal."""


def _refuse_breakpoint(*_args: object, **_kwargs: object) -> NoReturn:
    rank = os.environ["RANK"]
    raise PlatformError.because(
        f"breakpoint() in rank {rank}",
        "this rank has no terminal",
        None,
        f"{STDIN_VARIABLE}={rank} gives it yours; or --ranks 1 --on inline, in your own process",
    )


class IO:
    """Prints if `verbose` says so, which can be switched off for a whole program.

    Attributes:
        verbose: default of `print`; `Wrapper` sets it from its platform.
    """

    verbose: bool = True

    @staticmethod
    def print(
        *args: Any, verbose: bool | None = None, flush: bool = True, **print_kwargs: Any
    ) -> None:
        """Print as the builtin does, unless `verbose` (default: `IO.verbose`) is false."""
        if IO.verbose if verbose is None else verbose:
            print(*args, flush=flush, **print_kwargs)


def warn(message: str) -> None:
    """Issue a `RuntimeWarning` at the innermost frame that is not of this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)

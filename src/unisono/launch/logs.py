"""The logs of the ranks: what is shown and kept, one rank's log, and how others follow it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from unisono.errors import PlatformError, an
from unisono.expect import expect, expect_choice, expect_int
from unisono.launch.console import Console, warn

__all__ = ["Logs", "checked_logs"]

SHOW_ALL_UP_TO = 8
"""Largest world of which the console `auto` shows every rank."""
LOG_MB = 1024.0
"""Largest log of a rank; `UNISONO_LOG_MB` sets it."""
FAILED = b"--- failed, with this traceback:\n"
"""Line of a log after which comes no output of the rank, but how it failed."""
_ATTEMPT = b"--- attempt "
"""Start of the line with which the output of a new attempt begins."""
_MARK = b"--- "
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What happens to the output of the ranks."""

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


def checked_logs(logs: str | Path | Logs | None, ranks: int) -> Logs:
    """Return `logs` as a `Logs`, or raise `PlatformError` if it makes no sense for `ranks`."""
    if logs is None:
        logs = Logs()
    elif isinstance(logs, (str, Path)):
        logs = Logs(dir=logs)
    elif not isinstance(logs, Logs):
        raise PlatformError.because(
            f"unisono.run(..., logs={logs!r})",
            an(type(logs).__name__),
            None,
            'logs="runs" for a directory, or logs=unisono.Logs(console="rank0")',
        )
    console = logs.console
    if isinstance(console, str):
        known = ("auto", "all", "rank0", "none")
        expect_choice("Logs.console", console, known, error=PlatformError)
    else:
        expect(
            "Logs.console", console, (str, Collection), 'Logs(console="all"), or a list of ranks'
        )
        for rank in console:
            expect_int("a rank in Logs.console", rank, 0, ranks, error=PlatformError)
    return logs


class RankLog:
    """The log of one rank, to which bytes are added as they come.

    It never ends the run: where the disk takes no more, the output goes on without it. Nor does it
    fill the disk: at half of `UNISONO_LOG_MB` it becomes `rank-N.log.old`, and a new one begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = os.environ.get("UNISONO_LOG_MB") or str(LOG_MB)
        try:
            self._half = float(text) * 2**20 / 2
        except ValueError:
            raise PlatformError.because(
                f"UNISONO_LOG_MB={text}", "not a number", hint=f"UNISONO_LOG_MB={LOG_MB:g}"
            ) from None
        self._has_warned = False
        self._fd = self._open()

    def write(self, data: bytes) -> None:
        """Add `data`; warn once where that fails."""
        view = memoryview(data)
        try:
            size = os.fstat(self._fd).st_size
            if size and size + len(view) > self._half:
                self.path.replace(self.path.with_name(f"{self.path.name}.old"))
                full, self._fd = self._fd, self._open()
                os.close(full)
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

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


class LogReader:
    """Reads what has been added to a log since the last look, also where a new one has begun.

    Args:
        path: the log, which need not be there yet.
        tail: only so many lines of what is there already.
        tracebacks: whether to read those, too; whoever raises the error does not need them.

    Attributes:
        place: how much of it was read.
    """

    def __init__(self, path: Path, *, tail: int | None = None, tracebacks: bool = True) -> None:
        self._path = path
        self._inode: int | None = None
        self.place = 0
        if tail is not None and path.exists():
            data = path.read_bytes()
            shown = data.splitlines(keepends=True)[-tail:] if tail else []
            self.place = len(data) - sum(map(len, shown))
            self._inode = path.stat().st_ino
        self._tracebacks = tracebacks
        self._is_hidden = False
        self._rest = b""

    def new(self) -> Iterator[bytes]:
        """Yield what has come, in pieces."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._inode not in (None, found.st_ino) or found.st_size < self.place:
                # A new log has begun; perhaps more than one, and then some lines are gone.
                old = self._path.with_name(f"{self._path.name}.old")
                with suppress(FileNotFoundError), old.open("rb") as before:
                    if os.fstat(before.fileno()).st_ino != self._inode:
                        self.place = 0
                    yield from self._pieces(before)
                self.place = 0
            self._inode = found.st_ino
            yield from self._pieces(file)

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        file.seek(self.place)
        while data := file.read(_CHUNK):
            self.place += len(data)
            yield data if self._tracebacks else self._output_in(data)

    def _output_in(self, data: bytes) -> bytes:
        """Return `data` without tracebacks; what may become a mark waits for its end."""
        data, self._rest = self._rest + data, b""
        if not self._is_hidden and _MARK not in data and not data.endswith((b"-", b"--", b"---")):
            return data
        shown: list[bytes] = []
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n") and (line.startswith(_MARK) or _MARK.startswith(line)):
                self._rest = line
                continue
            if line == FAILED:
                self._is_hidden = True
            elif line.startswith(_ATTEMPT):
                self._is_hidden = False
            if not self._is_hidden:
                shown.append(line)
        return b"".join(shown)


class LogFollower:
    """Shows what has been added to the logs of some ranks since the last look.

    Args:
        directory: where they are.
        console: where they are shown.
        ranks: whose.
        tail: only so many lines of what is there already.
        tracebacks: whether to show those, too.
    """

    def __init__(
        self,
        directory: Path,
        console: Console,
        ranks: Collection[int],
        *,
        tail: int | None = None,
        tracebacks: bool = False,
    ) -> None:
        self._logs = [
            (
                LogReader(directory / f"rank-{rank}.log", tail=tail, tracebacks=tracebacks),
                console.stream(rank, 0),
            )
            for rank in ranks
        ]

    def look(self) -> None:
        """Show what is new."""
        for log, stream in self._logs:
            for data in log.new():
                stream.feed(data)

    def close(self) -> None:
        """Show the rest, also a last line that has no end."""
        self.look()
        for _, stream in self._logs:
            stream.close()


def size_of(path: Path) -> int:
    """Return how long a file is; 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def text_from(path: Path, offset: int = 0) -> str:
    """Return the text of a file from a place on; nothing if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def tail(path: Path, limit: int = 1 << 20) -> str:
    """Return the text of a log, or the last `limit` bytes of it; nothing if it is not there."""
    return text_from(path, max(0, size_of(path) - limit))

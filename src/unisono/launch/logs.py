"""The logs of the ranks: what is shown and kept, one rank's log, and how others follow it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.errors import PlatformError, an
from unisono.launch.console import Console, RankStream, warn

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
    words = ("auto", "all", "rank0", "none")
    if isinstance(logs.console, str):
        if logs.console not in words:
            raise PlatformError.because(
                f"Logs(console={logs.console!r})",
                f"none of {', '.join(map(repr, words))}, nor a list of ranks",
                None,
                'Logs(console="all")',
            )
    elif strange := [r for r in logs.console if not (isinstance(r, int) and 0 <= r < ranks)]:
        raise PlatformError.because(
            f"Logs(console={list(logs.console)!r})",
            f"{strange[0]!r} is not a rank",
            f"ranks of a world of {ranks} are 0 to {ranks - 1}",
        )
    return logs


class RankLog:
    """The log of one rank, to which bytes are added as they come.

    It never ends the run: where the disk takes no more, the output goes on without it. Nor does it
    fill the disk: at half of `UNISONO_LOG_MB` it becomes `rank-N.log.old`, and a new one begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._half = _log_mb() * 2**20 / 2
        self._has_warned = False
        self._fd = self._open()

    def write(self, data: bytes) -> None:
        """Add `data`; warn once where that fails."""
        view = memoryview(data)
        try:
            size = os.fstat(self._fd).st_size
            if size and size + len(view) > self._half:
                self._begin_anew()
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

    def _begin_anew(self) -> None:
        self.path.replace(self.path.with_name(f"{self.path.name}.old"))
        fd = self._open()
        os.close(self._fd)
        self._fd = fd

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _log_mb() -> float:
    text = os.environ.get("UNISONO_LOG_MB", "")
    try:
        return float(text) if text else LOG_MB
    except ValueError:
        raise PlatformError.because(
            f"UNISONO_LOG_MB={text}", "not a number", None, f"UNISONO_LOG_MB={LOG_MB:g}"
        ) from None


class LogFollower:
    """Shows what has been added to the logs of some ranks since the last look."""

    def __init__(
        self,
        directory: Path,
        console: Console,
        ranks: Collection[int],
        *,
        tail: int | None = None,
        tracebacks: bool = False,
    ) -> None:
        """Begin where the logs begin.

        Args:
            directory: where they are.
            console: where they are shown.
            ranks: whose.
            tail: only so many lines of what is there already.
            tracebacks: whether to show those, too; whoever raises the error does not need them.
        """
        self._logs = [
            _Log(directory / f"rank-{rank}.log", console.stream(rank, 0), tail, tracebacks)
            for rank in ranks
        ]

    def look(self) -> None:
        """Show what is new."""
        for log in self._logs:
            log.show_new()

    def close(self) -> None:
        """Show the rest, also a last line that has no end."""
        for log in self._logs:
            log.show_new()
            log.stream.close()


class _Log:
    """One log, and how far it has been shown."""

    def __init__(self, path: Path, stream: RankStream, tail: int | None, tracebacks: bool) -> None:
        self.stream = stream
        self._path = path
        self._place = 0 if tail is None else _place_of_tail(path, tail)
        self._tracebacks = tracebacks
        self._is_hidden = False
        self._rest = b""

    def show_new(self) -> None:
        """Pass on what has come."""
        try:
            if self._path.stat().st_size < self._place:  # a new one has begun
                self._show_rest(self._path.with_name(f"{self._path.name}.old"))
                self._place = 0
            self._show_rest(self._path)
        except FileNotFoundError:
            return

    def _show_rest(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._place)
            while data := file.read(_CHUNK):
                self._place += len(data)
                self.stream.feed(data if self._tracebacks else self._output_in(data))

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


def _place_of_tail(path: Path, lines: int) -> int:
    """Return where the last `lines` lines of a log begin."""
    data = path.read_bytes() if path.exists() else b""
    return len(data) - sum(map(len, data.splitlines(keepends=True)[-lines:] if lines else ()))


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
    try:
        return text_from(path, max(0, path.stat().st_size - limit))
    except OSError:
        return ""

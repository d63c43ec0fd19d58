"""The logs of ranks that others write, shown on the console as they grow."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from unisono.launch.console import Console, RankStream

FAILED = b"--- failed, with this traceback:\n"
"""Line of a log after which comes no output of the rank, but how it failed."""
_ATTEMPT = b"--- attempt "
"""Start of the line with which the output of a new attempt begins."""
_MARK = b"--- "
_CHUNK = 1 << 20


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

"""The logs of ranks on other hosts, shown on the console as they grow."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from unisono.launch.console import Console

_CHUNK = 1 << 20


class LogFollower:
    """Shows what has been added to the logs of some ranks since the last look."""

    def __init__(self, directory: Path, console: Console, ranks: Collection[int]) -> None:
        self._streams = {rank: console.stream(rank, 0) for rank in ranks}
        self._paths = {rank: directory / f"rank-{rank}.log" for rank in ranks}
        self._places = dict.fromkeys(ranks, 0)

    def look(self) -> None:
        """Show what is new."""
        for rank, path in self._paths.items():
            try:
                with path.open("rb") as file:
                    file.seek(self._places[rank])
                    while data := file.read(_CHUNK):
                        self._places[rank] += len(data)
                        self._streams[rank].feed(data)
            except FileNotFoundError:
                continue

    def close(self) -> None:
        """Show the rest, also a last line that has no end."""
        self.look()
        for stream in self._streams.values():
            stream.close()

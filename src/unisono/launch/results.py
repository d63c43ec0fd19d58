"""Results of a run: the return values of all ranks, in rank order, and a few facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from unisono.errors import PlatformError, an

if TYPE_CHECKING:
    from unisono.train.recording.report import Report

__all__ = ["Elsewhere", "Results"]

T = TypeVar("T")


@dataclass(frozen=True)
class Elsewhere:
    """Placeholder for a value that stayed on its rank, because only plain data is shared."""

    rank: int
    """Where the value is."""
    kind: str
    """Its type."""


class Results(Sequence[T], Generic[T]):
    """Return values by rank: `results[0]` is rank 0's. Read-only.

    Attributes:
        hosts: host of each rank.
        wall_s: seconds from the moment all ranks were ready to the last return.
        start_s: seconds until all ranks were ready.
        restarts: attempts before the one that succeeded.
        platform: where it ran, as `on` says it.
        threads: CPU threads of each rank.
        dir: directory of the run, if it was kept.
        report: report of the run, if it was recorded (`run(..., record="name")`).
    """

    def __init__(
        self,
        values: Sequence[T | Elsewhere],
        *,
        hosts: Sequence[str],
        platform: str,
        wall_s: float = 0.0,
        start_s: float = 0.0,
        restarts: int = 0,
        threads: int = 1,
        dir: Path | None = None,
        logs: Sequence[str] = (),
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._values = tuple(values)
        self._logs = tuple(logs)
        # Of an elastic job some ranks have died; the files of the others keep their numbers.
        self._numbers = tuple(range(len(self._values)) if numbers is None else numbers)
        self.hosts = tuple(hosts)
        self.platform = platform
        self.wall_s = wall_s
        self.start_s = start_s
        self.restarts = restarts
        self.threads = threads
        self.dir = dir
        self.report: Report | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        value = self._values[index]
        if isinstance(value, Elsewhere):
            raise PlatformError.because(
                f"results[{index}]",
                f"{an(value.kind)} that stayed on rank {value.rank}",
                None,
                "return numbers, strings, lists, dicts, numpy arrays or tensors",
            )
        return value

    def log(self, rank: int) -> str:
        """Return what `rank` printed (the end of it, where it was more than a megabyte)."""
        if self.dir is not None:
            path = self.dir / f"rank-{self._numbers[rank]}.log"
            if path.exists():
                return path.read_text(encoding="utf-8", errors="replace")
        return self._logs[rank] if self._logs else ""

    def __repr__(self) -> str:
        values = ", ".join(_text(value) for value in self._values[:4])
        more = f", ... {len(self)} in all" if len(self) > 4 else ""
        return f"Results([{values}{more}], platform={self.platform!r}, wall_s={self.wall_s:.3f})"


def _text(value: object) -> str:
    return f"<{value.kind} on rank {value.rank}>" if isinstance(value, Elsewhere) else repr(value)

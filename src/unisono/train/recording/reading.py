"""A run, read back from its directory: what ranks are, what they have logged, one value a step.

A line is `{"step": 3, "t": 1.25, "a": 0, "v": {"loss": 0.5}, ...}`; later attempts and later lines
of a rank replace earlier ones of the same step. No torch here.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.train.recording import directory as directories

SAMPLES = "samples"
"""The metric that counts what was worked on; summed over ranks, and the unit of throughput."""
_EXACT = 1e300
"""Below it values of any number of ranks are summed exactly."""
_CONSEQUENCES = ("RankFailed", "RankTimeout", "Stopped")
"""Types of errors that only say that another rank went away."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was logged."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    """Mean over the ranks that logged it (for `samples` the sum)."""
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Metrics:
    """All that was logged in a run."""

    steps: list[int]
    """Every step at which something was logged, ascending."""
    seconds: list[float]
    """When the last rank had logged it, from the moment the first rank began."""
    series: dict[str, Series]
    """By name, in the order in which they first appeared."""


class LineReader:
    """Reads the lines of one rank, each once, while they are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self.lines: list[dict[str, Any]] = []
        """Those read so far."""

    def read_new(self) -> LineReader:
        """Take what was added since the last time; a line that is not whole yet is left."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read()
        except OSError:
            return self
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # a rank that was killed while it wrote
                self.lines += filter(_is_line, [json.loads(line)])
        return self


def _is_line(line: Any) -> bool:
    """Return whether all that is read from a line later is there, and of its kind."""
    try:
        step = line["step"]
        numbers = [line[name] for name in ("t", "a", "blocked_s", "wait_s")]
        numbers += line["v"].values()
    except (TypeError, KeyError, AttributeError):
        return False
    return type(step) is int and all(isinstance(n, (int, float)) for n in numbers)


def merge(
    lines_of_ranks: Mapping[int, Iterable[Mapping[str, Any]]], began_s: float = 0.0
) -> Metrics:
    """Put the lines of all ranks together, one value per step and metric, from `began_s` on."""
    values: dict[str, dict[int, dict[int, float]]] = {}
    when: dict[int, dict[int, tuple[int, float]]] = {}
    for rank, lines in lines_of_ranks.items():
        for line in lines:
            step = int(line["step"])
            first = when.setdefault(step, {}).get(rank)
            if first is None or line["a"] > first[0]:  # what is added later took no step of time
                when[step][rank] = int(line["a"]), float(line["t"]) - began_s
            for name, value in line["v"].items():
                values.setdefault(name, {}).setdefault(step, {})[rank] = float(value)
    seconds = {step: max(at for _, at in times.values()) for step, times in when.items()}
    series: dict[str, Series] = {}
    for name, by_step in values.items():
        one = series[name] = Series()
        for step in sorted(by_step):
            numbers = list(by_step[step].values())
            # The exact sum is refused for NaN and inf, and where it grows beyond what floats hold.
            total = math.fsum(numbers) if all(abs(x) < _EXACT for x in numbers) else sum(numbers)
            one.steps.append(step)
            one.seconds.append(seconds[step])
            one.mean.append(total if name == SAMPLES else total / len(numbers))
            one.low.append(min(numbers))
            one.high.append(max(numbers))
    steps = sorted(when)
    return Metrics(steps, [seconds[step] for step in steps], series)


def write_csv(path: Path, metrics: Metrics) -> None:
    """Write one row per step: step, seconds, then every metric; empty where it was not logged."""
    columns = {name: dict(zip(s.steps, s.mean, strict=True)) for name, s in metrics.series.items()}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "seconds", *columns])
        for step, second in zip(metrics.steps, metrics.seconds, strict=True):
            cells = (f"{c[step]:.9g}" if step in c else "" for c in columns.values())
            writer.writerow([step, f"{second:.6f}", *cells])


def throughput(metrics: Metrics, points: int = 120) -> tuple[str, list[int], list[float]]:
    """Return the unit, and at some steps how much was done per second since the one before.

    Samples where they were logged, else steps. Neighbouring steps are taken together, so that a
    long run gives about `points` values.
    """
    steps, seconds, amounts = _amounts(metrics)
    at: list[int] = []
    rates: list[float] = []
    stride = max(1, math.ceil((len(steps) - 1) / points))
    for end in range(stride, len(steps), stride):
        begin = end - stride
        elapsed = seconds[end] - seconds[begin]
        if elapsed > 0:
            at.append(steps[end])
            rates.append(sum(amounts[begin + 1 : end + 1]) / elapsed)
    return f"{SAMPLES}/s" if SAMPLES in metrics.series else "steps/s", at, rates


def overall_throughput(metrics: Metrics) -> float | None:
    """Return samples (or steps) per second from the first logged step to the last."""
    _, seconds, amounts = _amounts(metrics)
    if len(seconds) < 2 or seconds[-1] <= seconds[0]:
        return None
    return sum(amounts[1:]) / (seconds[-1] - seconds[0])


def _amounts(metrics: Metrics) -> tuple[list[int], list[float], list[float]]:
    """Return steps, when they ended, and how much was done in each."""
    counted = metrics.series.get(SAMPLES)
    if counted is None:
        return metrics.steps, metrics.seconds, [1.0] * len(metrics.steps)
    return counted.steps, counted.seconds, counted.mean


@dataclass(frozen=True)
class RecordedRun:
    """A directory, read."""

    directory: Path
    config: dict[str, Any]
    parts: list[dict[str, Any]]
    """What each rank is and has measured, by rank."""
    lines: dict[int, list[dict[str, Any]]]
    """What each rank has logged."""
    merged: Metrics
    began_s: float
    """When the first rank began, or was first heard of."""

    @classmethod
    def read(cls, directory: Path, readers: dict[int, LineReader] | None = None) -> RecordedRun:
        """Read what ranks have written so far; `readers` remember what they have read before."""
        ranks = directories.ranks_in(directory)
        readers = {} if readers is None else readers
        for rank in ranks:
            if rank not in readers:
                readers[rank] = LineReader(directories.rank_file(directory, rank, "jsonl"))
        parts = [directories.read_json(directories.rank_file(directory, r, "json")) for r in ranks]
        lines = {rank: readers[rank].read_new().lines for rank in ranks}
        config = directories.read_json(directory / directories.CONFIG)
        for part in parts[:1]:
            config["config"] = {**config.get("config", {}), **part.get("config", {})}
        parts = [part for part in parts if part]
        # Parts are of the last attempt; what an earlier one logged came before it.
        signs = [part["began_s"] for part in parts]
        signs += [line["t"] for lines_of_rank in lines.values() for line in lines_of_rank[:1]]
        began_s = min(signs, default=0.0)
        return cls(directory, config, parts, lines, merge(lines, began_s), began_s)

    @property
    def stepping(self) -> Metrics:
        """Where steps ended: as logged, else as the optimizer of the first rank made them."""
        marks = [] if self.merged.steps or not self.parts else self.parts[0].get("marks", [])
        if not marks:
            return self.merged
        last = self.parts[0]["mark_count"]
        seconds = [at / 1e9 - self.began_s for at, _, _ in marks]
        return Metrics(list(range(last - len(marks), last)), seconds, {})

    @property
    def status(self) -> str:
        """`done`, `failed` or `running`, as the ranks say."""
        if (self.directory / directories.COMPARISON).is_file():
            return "done"
        said = {part["status"] for part in self.parts}
        if not said or "failed" in said:
            return "failed"
        return "done" if said == {"done"} else "running"

    @property
    def trouble(self) -> str:
        """The first line of what went wrong on a rank, best the one that others fell over."""
        notes = [
            (part["rank"], part["trouble"].strip().splitlines()[-1])
            for part in self.parts
            if part["trouble"]
        ]
        notes.sort(key=lambda pair: pair[1].partition(":")[0].split(".")[-1] in _CONSEQUENCES)
        return f"rank {notes[0][0]}: {notes[0][1]}" if notes else ""

    @property
    def attempts(self) -> int:
        """How often the run was started."""
        return max((part["attempt"] for part in self.parts), default=0) + 1

    @property
    def seconds(self) -> float:
        """From the moment the first rank began to the last sign of life of any rank."""
        ends = [part["ended_s"] - self.began_s for part in self.parts if "ended_s" in part]
        return max([*ends, *self.merged.seconds[-1:]], default=0.0)

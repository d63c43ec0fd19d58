"""What all benchmarks share: interleaved timing on ranks, one table, one page of results.

Machines are shared and noisy, so nothing is judged in seconds: a case and its reference take turns
in the same processes, and a round counts its slowest rank.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from summary import with_summary
from torch.profiler import ProfilerActivity, profile

from unisono.comm import Communicator
from unisono.cores import usable_cores

RESULTS = Path(__file__).with_name("RESULTS.md")
IS_CHECKOUT = (RESULTS.parents[1] / "pyproject.toml").is_file()
"""Whether results may be written beside the scripts: never into an installed package."""


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table; times in seconds."""

    case: str
    ours: float
    reference: float
    reference_name: str
    target: float | None
    """Largest ratio that counts as reached; None where none is set."""
    note: str = ""
    at_least: float | None = None
    """Smallest ratio that counts as reached, where being below is a miss too."""

    @property
    def ratio(self) -> float:
        """Ours over the reference."""
        return self.ours / self.reference

    @property
    def verdict(self) -> str:
        """Whether the target is reached."""
        if self.target is None:
            return "-"
        reached = (self.at_least or 0.0) <= self.ratio <= self.target
        return "ok" if reached else "MISSED"

    @property
    def aim(self) -> str:
        """The target as text."""
        if self.target is None:
            return "-"
        if self.at_least is not None:
            return f"{self.at_least:g} to {self.target:g}"
        return f"<= {self.target:g}"


@dataclass(frozen=True)
class Figure:
    """A ratio that is arithmetic, or measured in one process."""

    case: str
    value: float
    target: float
    note: str

    def line(self) -> str:
        """Return the row of the table."""
        verdict = "ok" if self.value <= self.target else "MISSED"
        return f"| {self.case} | {self.value:.3f} | <= {self.target:g} | {verdict} ({self.note}) |"


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one candidate: one figure per round, that of the slowest rank."""

    rounds: list[float]

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.rounds)

    def row(self, case: str, reference: Timing, name: str, target: float | None) -> Row:
        """Return the median over rounds of the ratio within a round, and the range of ratios."""
        ratios = [a / b for a, b in zip(self.rounds, reference.rounds, strict=True)]
        base, note = reference.median, f"rounds {min(ratios):.2f}-{max(ratios):.2f}"
        return Row(case, statistics.median(ratios) * base, base, name, target, note)


def take_turns(
    comm: Communicator,
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeats: int = 1,
    warm_up: int = 2,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Timing]:
    """Time all candidates in turns, `repeats` calls each; every other round in reverse order.

    What comes later in a round finds the ranks in another rhythm, hence both orders. `before` has
    what is done before a turn and not timed. Collective over `comm`.
    """
    for run in candidates.values():
        for _ in range(warm_up):
            run()
    turns = list(enumerate(candidates.items()))
    times = torch.zeros(rounds, len(turns), dtype=torch.float64)
    for i in range(rounds):
        for j, (name, run) in reversed(turns) if i % 2 else turns:
            if before is not None and name in before:
                before[name]()
            comm.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            times[i, j] = (time.perf_counter() - start) / repeats
    slowest = comm.all_reduce(times, "max").T.tolist()
    return {name: Timing(slowest[j]) for j, (name, _) in turns}


def interleaved(
    comm: Communicator,
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    repeats: int = 1,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Return the median of each candidate's turns. Collective over `comm`."""
    found = take_turns(comm, candidates, rounds=rounds, repeats=repeats, before=before)
    return {name: timing.median for name, timing in found.items()}


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that torch holds at once within `run`, beyond its beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = peak = 0
    events: list[Any] = list(recorded.profiler.kineto_results.events())
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    """Return the command line that all benchmarks have; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing is written")
    return parser


def markdown(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| case | ours | reference | ratio | target | verdict |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        lines.append(
            f"| {row.case} | {_time(row.ours)} | {_time(row.reference)} {row.reference_name} "
            f"| {row.ratio:.2f} | {row.aim} | {row.verdict}{note} |"
        )
    return "\n".join(lines)


def figure_table(figures: Iterable[Figure]) -> str:
    """Return figures as a Markdown table."""
    heading = ["| case | ratio | target | verdict |", "|---|---:|---:|---|"]
    return "\n".join([*heading, *(figure.line() for figure in figures)])


def publish(section: str, text: str, *, write: bool = True) -> None:
    """Print `text` and put it under the heading `section` of RESULTS.md, in place of the old.

    The page's first table, of all ratios that have a target, is made anew from all sections.
    An installed package carries the scripts and the page along; nothing is written there.
    """
    today = datetime.datetime.now(tz=datetime.UTC).date()
    machine = (
        f"{platform.machine()}, {usable_cores()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    body = f"## {section}\n\nMeasured on {today}, {machine}.\n\n{text.strip()}\n"
    print(body)
    if not write or not IS_CHECKOUT:
        return
    page = RESULTS.read_text(encoding="utf-8")
    pattern = re.compile(rf"^## {re.escape(section)}\n.*?(?=^## |\Z)", re.S | re.M)
    if pattern.search(page):
        page = pattern.sub(lambda _: body + "\n", page)
    else:
        page = page.rstrip() + "\n\n" + body
    RESULTS.write_text(with_summary(page).rstrip() + "\n", encoding="utf-8")


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"

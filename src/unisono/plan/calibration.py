"""What was measured on a machine, as a file; and the machine as a cluster to plan with. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from unisono.errors import PlatformError
from unisono.plan.cluster import Cluster
from unisono.plan.links import Link, all_reduce
from unisono.plan.quantities import write_rate, write_time
from unisono.plan.workload import fit_pace

__all__ = ["Calibration", "calibration_file", "fit_link", "read_calibration"]

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A machine: its cores, its links, and how ranks disturb each other."""

    cores: int
    links: Mapping[str, Link]
    """`shm` and `gloo`, between ranks of this machine."""
    memcpy_bytes_per_s: float
    slowdown: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By model: how much longer its step takes when so many ranks compute at once."""
    machine: str = "typical values, not measured"
    """Where and when."""

    def here(self, ranks: int, *, link: str = "shm", model: str = "") -> Cluster:
        """Return this machine with so many ranks."""
        return Cluster(
            nodes=1,
            ranks_per_node=ranks,
            inner=self.links[link],
            outer=self.links[link],
            cores_per_node=self.cores,
            slowdown=self.slowdown_of(model),
        )

    def slowdown_of(self, model: str) -> dict[int, float]:
        """Return the factors of a model; for one that was not measured, the mean of the others."""
        if model in self.slowdown or not self.slowdown:
            return dict(self.slowdown.get(model, {}))
        tables = list(self.slowdown.values())
        counts = set.intersection(*(set(table) for table in tables))
        return {n: sum(table[n] for table in tables) / len(tables) for n in sorted(counts)}

    def describe(self) -> str:
        """Return what was measured, one line a fact."""
        lines = [f"{self.machine}, {self.cores} cores"]
        for link in self.links.values():
            crowded = "".join(f", {f:.2f} x longer on {n} ranks" for n, f in link.slowdown.items())
            lines.append(
                f"{link.name}: {write_time(link.latency_s)} + n / {write_rate(link.bytes_per_s)}, "
                f"{link.overlap:.0%} beside computing{crowded}"
            )
        for model, table in self.slowdown.items():
            factors = ", ".join(f"{f:.2f} x with {n}" for n, f in table.items() if n > 1)
            lines.append(f"a step of {model}: {factors} ranks at once")
        lines.append(f"a core copies {write_rate(self.memcpy_bytes_per_s)}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Save it; the directory is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": _VERSION, **asdict(self)}, indent=1) + "\n")


TYPICAL = Calibration(
    cores=os.cpu_count() or 1,
    links={
        "shm": Link(
            name="shm", latency_s=30e-6, bytes_per_s=5e9, overlap=0.0, direct=True, on_cores=True
        ),
        "gloo": Link(name="gloo", latency_s=200e-6, bytes_per_s=1e9, overlap=0.3, on_cores=True),
    },
    memcpy_bytes_per_s=8e9,
)
"""Used where nothing was measured."""


def calibration_file() -> Path:
    """Return where measurements of this machine are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "unisono" / "calibration.json"


def read_calibration(path: Path | None = None) -> Calibration:
    """Return the calibration saved at `path`, or that of this machine, or typical values.

    Raises:
        PlatformError: a file that was asked for is not there, or is something else.
    """
    file = path or calibration_file()
    if path is None and not file.exists():
        return TYPICAL
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved.pop("version") != _VERSION:
            raise ValueError("written by another release")
        links = {
            name: Link(**{**link, "slowdown": _by_count(link["slowdown"])})
            for name, link in saved.pop("links").items()
        }
        slowdown = {model: _by_count(table) for model, table in saved.pop("slowdown").items()}
        return Calibration(**saved, links=links, slowdown=slowdown)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlatformError.because(
            f"the calibration in {file}", f"{type(error).__name__}: {error}",
            hint="unisono plan --calibrate",
        ) from None  # fmt: skip


def fit_link(link: Link, measured: Mapping[int, Sequence[tuple[int, float]]]) -> Link:
    """Return `link` with latency and bandwidth that explain measured sums.

    Args:
        link: what is known of it.
        measured: by number of ranks, bytes and seconds of sums over them. Two ranks give latency
            and bandwidth, more of them the slowdown.

    >>> link = Link(name="shm", latency_s=1.0, bytes_per_s=1.0, direct=True)
    >>> fitted = fit_link(link, {2: [(1000, 3e-6), (2000, 4e-6)]})
    >>> round(fitted.latency_s * 1e6, 3), round(fitted.bytes_per_s / 1e9, 3)
    (1.0, 1.0)
    """
    first, *others = sorted(measured)
    unit = replace(link, latency_s=1.0, bytes_per_s=1.0, slowdown={})
    still = replace(unit, latency_s=0.0)
    per_byte = all_reduce(1.0, first, still)
    latencies = all_reduce(0.0, first, unit)
    sizes, seconds = zip(*measured[first], strict=True)
    line = fit_pace([n * per_byte for n in sizes], seconds)
    fitted = replace(
        link,
        latency_s=line.fixed_s / latencies,
        bytes_per_s=1 / max(line.sample_s, 1e-15),
        slowdown={},
    )
    slowdown = {first: 1.0}
    for ranks in others:
        moving = replace(fitted, latency_s=0.0)
        waiting = all_reduce(0.0, ranks, fitted)
        found = [
            max(t - waiting, 0.0) / all_reduce(n, ranks, moving) for n, t in measured[ranks][-2:]
        ]
        slowdown[ranks] = max(1.0, sum(found) / len(found))
    return replace(fitted, slowdown=slowdown)


def _by_count(table: Mapping[str, float]) -> dict[int, float]:
    return {int(count): float(factor) for count, factor in table.items()}

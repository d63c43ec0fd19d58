"""A machine, measured: its links, how ranks slow each other down, and the file of both."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import unisono
from unisono.comm import Communicator
from unisono.cores import usable_cores
from unisono.errors import PlatformError
from unisono.plan.cluster import Cluster, Link, all_reduce
from unisono.plan.profile import step_of
from unisono.plan.quantities import write_rate, write_time
from unisono.plan.subject import Subject
from unisono.plan.workload import fit_pace

_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A machine: its cores, its links, and how ranks disturb each other."""

    cores: int
    links: Mapping[str, Link]
    """`shm` and `gloo`, between ranks of this machine."""
    slowdown: Mapping[int, float] = field(default_factory=dict)
    """How much longer a step takes, by the number of ranks that compute at once."""
    machine: str = "typical values, not measured"
    """Where and when."""

    def here(self, ranks: int, *, link: str = "shm") -> Cluster:
        """Return this machine with this number of ranks."""
        return Cluster(
            nodes=1,
            ranks_per_node=ranks,
            inner=self.links[link],
            outer=self.links[link],
            cores_per_node=self.cores,
            slowdown=self.slowdown,
        )

    def describe(self) -> str:
        """Return what was measured, one line a fact."""
        lines = [f"{self.machine}, {self.cores} cores"]
        for link in self.links.values():
            crowded = "".join(f", {f:.2f} x longer on {n} ranks" for n, f in link.slowdown.items())
            lines.append(
                f"{link.name}: {write_time(link.latency_s)} + n / {write_rate(link.bytes_per_s)}, "
                f"{link.overlap:.0%} beside computing{crowded}"
            )
        factors = [f"{f:.2f} x with {n}" for n, f in self.slowdown.items() if n > 1]
        if factors:
            lines.append(f"a step takes longer: {', '.join(factors)} ranks at once")
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
        slowdown = _by_count(saved.pop("slowdown"))
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
        factors = [
            max(t - waiting, 0.0) / all_reduce(n, ranks, moving) for n, t in measured[ranks][-2:]
        ]
        slowdown[ranks] = max(1.0, sum(factors) / len(factors))
    return replace(fitted, slowdown=slowdown)


def _by_count(table: Mapping[str, float]) -> dict[int, float]:
    return {int(count): float(factor) for count, factor in table.items()}


# -- measuring -----------------------------------------------------------------------------------

RANKS = (2, 4)
SIZES = (4 << 10, 256 << 10, 2 << 20, 8 << 20)
_ROUNDS = 9


def calibrate(
    subjects: Sequence[Callable[[], Subject]],
    *,
    ranks: Sequence[int] = RANKS,
    rounds: int = _ROUNDS,
) -> Calibration:
    """Measure links over 2 and 4 ranks, and steps of models on 1, 2 and 4 ranks at once.

    Starts ranks on this host, one thread each. Best on a machine that does nothing else.

    Args:
        subjects: functions that make the models, on the ranks.
        ranks: numbers of ranks.
        rounds: of each measurement; medians count.
    """
    sums: dict[str, dict[int, list[tuple[int, float]]]] = {"shm": {}, "gloo": {}}
    slowdown: dict[int, float] = {}
    alone: list[float] = []
    overlap = 0.0
    for count in (1, *ranks):
        measured = unisono.run(_measure, list(subjects), rounds, ranks=count)[0]
        alone = alone or measured["steps"]
        ratios = [here / first for here, first in zip(measured["steps"], alone, strict=True)]
        slowdown[count] = max(1.0, statistics.fmean(ratios))
        for backend, times in measured["sums"].items():
            sums[backend][count] = times
        if count == ranks[0]:
            overlap = measured["overlap"]
    links = {name: fit_link(TYPICAL.links[name], sums[name]) for name in sums}
    links["gloo"] = replace(links["gloo"], overlap=overlap)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return Calibration(
        cores=usable_cores(),
        links=links,
        slowdown=slowdown,
        machine=f"{platform.node()}, {platform.machine()}, torch {torch.__version__}, {today}",
    )


def group_over(backend: str) -> Communicator:
    """Return all ranks over a backend, on this host. Collective over the world."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = before or "lo"
    try:
        return Communicator.of(dist.new_group(backend=backend))
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]


def sums_over(comm: Communicator) -> dict[int, Callable[[], object]]:
    """Return in-place sums by their bytes, made as gradient buckets are added. Collective."""
    cases: dict[int, Callable[[], object]] = {}
    for nbytes in SIZES:
        x = comm.shared_buffer((nbytes // 4,), torch.float32)
        cases[nbytes] = partial(comm.all_reduce_, x.fill_(1.0), "mean")
    return cases


def overlapping(comm: Communicator) -> list[Callable[[], object]]:
    """Return a sum, some computing, and both at once. Collective over `comm` when called."""
    x, a = torch.ones(1 << 20), torch.randn(256, 256)

    def send() -> None:
        comm.all_reduce_(x, "mean")

    def compute() -> None:
        for _ in range(12):
            torch.mm(a, a)

    def both() -> None:
        pending = comm.start.all_reduce_(x, "mean")
        compute()
        pending.wait()

    return [send, compute, both]


def hidden_share(sending_s: float, computing_s: float, together_s: float) -> float:
    """Return which share of the shorter of two disappears behind the other.

    >>> hidden_share(2.0, 4.0, 4.0), hidden_share(2.0, 4.0, 6.0), hidden_share(2.0, 4.0, 5.0)
    (1.0, 0.0, 0.5)
    """
    hidden = (sending_s + computing_s - together_s) / min(sending_s, computing_s)
    return min(1.0, max(0.0, hidden))


def _measure(makers: Sequence[Callable[[], Subject]], rounds: int) -> dict:
    """Measure everything that this number of ranks can tell. Collective over the world."""
    torch.set_num_threads(1)
    comm = unisono.world()
    steps: list[float] = []
    for make in makers:
        torch.manual_seed(comm.rank)
        step = step_of(make())
        count = max(1, min(40, round(0.15 / max(sum(step()), 1e-6))))
        count = int(comm.all_reduce(torch.tensor([count]), "min"))
        times = [_timed(comm, step, repeats=count) for _ in range(rounds)]
        # Ranks that share a core take turns: their mean is what the core does.
        mean = comm.all_reduce(torch.tensor([statistics.median(times)]), "mean")
        steps.append(float(mean))
    if comm.size == 1:
        return {"steps": steps, "sums": {}, "overlap": 0.0}
    groups = {backend: group_over(backend) for backend in ("shm", "gloo")}
    sums = {
        backend: [(n, _median(group, add, rounds)) for n, add in sums_over(group).items()]
        for backend, group in groups.items()
    }
    parts = [_median(groups["gloo"], work, rounds) for work in overlapping(groups["gloo"])]
    return {"steps": steps, "sums": sums, "overlap": hidden_share(*parts)}


def _median(comm: Communicator, work: Callable[[], object], rounds: int) -> float:
    """Return the median time of the slowest rank."""
    work()
    times = torch.tensor([_timed(comm, work, repeats=3) for _ in range(rounds)])
    return float(comm.all_reduce(times, "max").median())


def _timed(comm: Communicator, work: Callable[[], object], repeats: int) -> float:
    comm.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats

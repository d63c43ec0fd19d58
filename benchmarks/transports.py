"""Transports side by side: gloo, shm, shm on shared buffers, over sizes, verbs and ranks.

    python benchmarks/transports.py [--quick] [--also BACKEND ...]

All are called through torch.distributed, in one run, in turns; a round counts its slowest rank.
`--also` adds columns for other registered backends that can make groups in such a world.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Row, markdown, publish
from torch import Tensor, nn

import unisono
from unisono.comm import Communicator

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 10 * KB, 100 * KB, MB, 10 * MB, 100 * MB)
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
TARGETS = {
    (2, "all_reduce", KB, "shm"): 0.15,
    (2, "all_reduce", MB, "shm"): 0.30,
    (2, "all_reduce", 100 * MB, "shm"): 0.45,
    (2, "all_reduce", 10 * MB, "zero-copy"): 0.15,
    (2, "all_gather", 10 * MB, "shm"): 0.40,
    (2, "reduce_scatter", MB, "shm"): 0.50,
    (2, "all_to_all", MB, "shm"): 0.80,
    (4, "all_reduce", KB, "shm"): 0.20,
}
"""Largest ratios to gloo; with more ranks than cores, anything below 1 is asked for."""
PICTURE = Path(__file__).with_name("transports.png")


@dataclass(frozen=True)
class Point:
    """Median time of one transport for one verb and size, in seconds."""

    ranks: int
    verb: str
    nbytes: int
    transport: str
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """One way to do a thing: what is timed, and what is done before each time."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


def rounds_for(nbytes: int, quick: bool) -> int:
    """Fewer rounds where one takes long."""
    if quick:
        return 3
    return 25 if nbytes <= MB else 15 if nbytes <= 10 * MB else 7


def measure(
    comm: Communicator, candidates: dict[str, Candidate], rounds: int, repeats: int = 1
) -> dict[str, float]:
    """Return the median over rounds of the slowest rank's time per call, candidates in turns."""
    times = torch.zeros(rounds + 2, len(candidates), dtype=torch.float64)
    for i in range(rounds + 2):
        for j, candidate in enumerate(candidates.values()):
            candidate.before()
            comm.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                candidate.run()
            times[i, j] = (time.perf_counter() - start) / repeats
    slowest = comm.all_reduce(times, "max")[2:]
    return {name: statistics.median(slowest[:, j].tolist()) for j, name in enumerate(candidates)}


def call(verb: str, x: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a call of `verb` with `x` as the full tensor of the collective."""
    piece = torch.empty(x.numel() // group.size())
    whole = torch.empty_like(x)
    return {
        "all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, x[: len(piece)], group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(piece, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(whole, x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
    }[verb]


def sweep(sizes: tuple[int, ...], quick: bool, also: tuple[str, ...]) -> list[Point]:
    """Measure all transports over sizes and verbs. Collective over the world."""
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "shm", *also)}
    comm = Communicator.of(groups["shm"])
    points: list[Point] = []
    for nbytes in sizes:
        n = nbytes // 4 // comm.size * comm.size
        shared = comm.shared_buffer((n,), torch.float32)
        for verb in VERBS:
            candidates: dict[str, Candidate] = {}
            for name, group in groups.items():
                x = torch.ones(n)
                candidates[name] = Candidate(call(verb, x, group), lambda x=x: x.fill_(1.0))
            # Filled again each time: else it would stay in the cache of whoever reduced it.
            candidates["zero-copy"] = Candidate(
                call(verb, shared, groups["shm"]), lambda x=shared: x.fill_(1.0)
            )
            rounds, repeats = rounds_for(nbytes, quick), 10 if nbytes <= 100 * KB else 1
            for name, seconds in measure(comm, candidates, rounds, repeats).items():
                points.append(Point(comm.size, verb, nbytes, name, seconds))
    return points


def special_cases(quick: bool) -> list[Row]:
    """Memory speed, the price of not waiting, and a DDP step. Collective over the world."""
    gloo, shm = dist.new_group(backend="gloo"), dist.new_group(backend="shm")
    comm = Communicator.of(shm)
    rows: list[Row] = []
    n = 10 * MB // 4
    whole, piece, source = torch.ones(n), torch.ones(n // comm.size), torch.ones(n)
    found = measure(
        comm,
        {
            "shm": Candidate(lambda: dist.all_gather_single(whole, piece, group=shm)),
            "memcpy": Candidate(lambda: whole.copy_(source)),
        },
        rounds_for(10 * MB, quick),
    )
    rows.append(
        Row("all_gather 10 MB, 2 ranks", found["shm"], found["memcpy"], "memcpy of 10 MB", 4.0)
    )
    x = torch.ones(256)
    found = measure(
        comm,
        {
            "async": Candidate(lambda: dist.all_reduce(x, group=shm, async_op=True).wait()),
            "sync": Candidate(lambda: dist.all_reduce(x, group=shm)),
        },
        rounds_for(KB, quick),
        repeats=10,
    )
    rows.append(
        Row("async all_reduce 1 KB and wait, 2 ranks", found["async"], found["sync"], "sync", 4.0)
    )
    found = measure(
        comm,
        {"shm": Candidate(ddp_step(shm)), "gloo": Candidate(ddp_step(gloo))},
        5 if quick else 40,
    )
    rows.append(
        Row("DDP step, MLP 784-1024-1024-10, batch 64, 2 ranks", found["shm"], found["gloo"],
            "DDP over gloo", 0.8)
    )  # fmt: skip
    return rows


def ddp_step(group: dist.ProcessGroup) -> Callable[[], None]:
    """Return one training step of torch's DDP on `group`."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    parallel = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(x), y).backward()
        optimizer.step()

    return step


def judged(points: list[Point]) -> list[Row]:
    """Return the points for which a ratio to gloo is set."""
    gloo = {(p.ranks, p.verb, p.nbytes): p.seconds for p in points if p.transport == "gloo"}
    rows: list[Row] = []
    for p in points:
        target = TARGETS.get((p.ranks, p.verb, p.nbytes, p.transport))
        if target is None and p.ranks > 2 and p.transport == "shm":
            target = 1.0
        if target is not None:
            case = f"{p.transport} {p.verb} {size_name(p.nbytes)}, {p.ranks} ranks"
            reference = gloo[p.ranks, p.verb, p.nbytes]
            rows.append(Row(case, p.seconds, reference, "gloo", target))
    return rows


def overview(points: list[Point]) -> str:
    """Return one table: gloo's time, and each transport as a ratio to it."""
    names = list(dict.fromkeys(p.transport for p in points if p.transport != "gloo"))
    seconds = {(p.ranks, p.verb, p.nbytes, p.transport): p.seconds for p in points}
    lines = [
        f"| ranks | verb | size | gloo | {' | '.join(names)} |",
        f"|---|---|---|---:|{'---:|' * len(names)}",
    ]
    for ranks, verb, nbytes in dict.fromkeys((p.ranks, p.verb, p.nbytes) for p in points):
        reference = seconds[ranks, verb, nbytes, "gloo"]
        ratios = " | ".join(
            f"{seconds[ranks, verb, nbytes, name] / reference:.3f}" for name in names
        )
        cell = f"{reference * 1e6:.0f} us" if reference < 1e-3 else f"{reference * 1e3:.2f} ms"
        lines.append(f"| {ranks} | {verb} | {size_name(nbytes)} | {cell} | {ratios} |")
    return "\n".join(lines)


def draw(points: list[Point], path: Path) -> None:
    """Draw time over size for each verb, if matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    worlds = sorted({p.ranks for p in points})
    figure, axes = plt.subplots(
        len(worlds),
        len(VERBS),
        figsize=(3 * len(VERBS), 3 * len(worlds)),
        sharey=True,
        squeeze=False,
    )
    for row, ranks in zip(axes, worlds, strict=True):
        for axis, verb in zip(row, VERBS, strict=True):
            for name in dict.fromkeys(p.transport for p in points):
                mine = [p for p in points if (p.ranks, p.verb, p.transport) == (ranks, verb, name)]
                axis.loglog([p.nbytes for p in mine], [p.seconds for p in mine], "o-", label=name)
            axis.set_title(f"{verb}, {ranks} ranks")
            axis.set_xlabel("bytes")
            axis.grid(alpha=0.3)
        row[0].set_ylabel("seconds")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def size_name(nbytes: int) -> str:
    """Return a size in KB or MB."""
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def main() -> None:
    """Run everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few rounds and sizes, nothing written"
    )
    parser.add_argument("--also", nargs="*", default=[], help="further backends to measure")
    options = parser.parse_args()
    sizes = (KB, MB) if options.quick else SIZES
    os.environ["UNISONO_BACKEND"] = "gloo"
    os.environ["OMP_NUM_THREADS"] = "1"
    points: list[Point] = []
    for ranks in (2, 4):
        points += unisono.run(sweep, sizes, options.quick, tuple(options.also), ranks=ranks)[0]
    special = unisono.run(special_cases, options.quick, ranks=2)[0]
    text = f"{markdown([*judged(points), *special])}\n\nRatios to gloo:\n\n{overview(points)}"
    publish("Transports", text, write=not options.quick)
    if not options.quick:
        draw(points, PICTURE)


if __name__ == "__main__":
    main()

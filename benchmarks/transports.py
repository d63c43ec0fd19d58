"""Transports side by side: gloo, shm, shm on shared buffers and mpi, over sizes, verbs and ranks.

    python benchmarks/transports.py [--quick] [--also BACKEND ...]

All are called through torch.distributed, in one run, in turns; a round counts its slowest rank.
For the column `mpi` the script starts itself once more under mpiexec and measures MPI and gloo
there, in turns; every ratio is to the gloo of the same processes. `--also` adds columns for other
registered backends that can make groups in a world of gloo.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import IS_CHECKOUT, Row, interleaved, markdown, parser_for, publish
from torch import Tensor, nn

import unisono
from unisono import operators
from unisono.comm import Communicator, detect, start_world, transports

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
MPI_TARGETS = {
    (2, "comm.all_reduce_", KB): 1.8,
    (2, "comm.all_reduce_", 64 * KB): 0.8,
    (2, "comm.all_reduce_", MB): 0.6,
    (2, "comm.all_reduce_", 10 * MB): 0.8,
    (2, "comm.all_reduce_", 100 * MB): 0.4,
    (2, "dist.all_reduce", KB): 4.0,
    (4, "comm.all_reduce_", KB): 0.2,
    (4, "comm.all_reduce_", MB): 0.15,
    (4, "comm.all_reduce_", 10 * MB): 0.75,
}
"""Largest ratios of shm to `Allreduce` of mpi4py in the same processes."""
MAX_OPERATOR_S = 60e-6
"""Most that an operator's forward and backward may cost beyond its two collectives."""
PICTURE = Path(__file__).with_name("transports.png")


@dataclass(frozen=True)
class Point:
    """Median time of one transport for one verb and size, in seconds."""

    ranks: int
    verb: str
    nbytes: int
    transport: str
    seconds: float
    gloo: float
    """What gloo took in the same processes."""

    @property
    def ratio(self) -> float:
        """Time over gloo's."""
        return self.seconds / self.gloo


def rounds_for(nbytes: int, quick: bool) -> int:
    """Fewer rounds where one takes long."""
    if quick:
        return 3
    return 25 if nbytes <= MB else 15 if nbytes <= 10 * MB else 7


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


def new_group(backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Return a group of all ranks, or of some, which alone take part. Collective over them."""
    group = dist.new_group(ranks, backend=backend, use_local_synchronization=ranks is not None)
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"this rank is not in the group of {ranks}")
    return group


def sweep(sizes: tuple[int, ...], quick: bool, also: tuple[str, ...]) -> list[Point]:
    """Measure gloo, shm and further backends. Collective over the world."""
    groups = {name: new_group(name) for name in ("gloo", "shm", *also)}
    return measure_groups(groups, sizes, quick)


def measure_groups(
    groups: dict[str, dist.ProcessGroup], sizes: tuple[int, ...], quick: bool
) -> list[Point]:
    """Measure all groups over sizes and verbs, and shared buffers where there is a shm group."""
    shm = groups.get("shm")
    comm = Communicator.of(shm or list(groups.values())[-1])
    points: list[Point] = []
    for nbytes in sizes:
        n = nbytes // 4 // comm.size * comm.size
        shared = comm.shared_buffer((n,), torch.float32)
        for verb in VERBS:
            buffers = {name: (torch.ones(n), group) for name, group in groups.items()}
            if shm is not None:
                buffers["zero-copy"] = shared, shm
            candidates = {name: call(verb, x, group) for name, (x, group) in buffers.items()}
            # Filled again each time: else it would stay in the cache of whoever reduced it.
            fills = {name: functools.partial(x.fill_, 1.0) for name, (x, _) in buffers.items()}
            rounds, repeats = rounds_for(nbytes, quick), 10 if nbytes <= 100 * KB else 1
            found = interleaved(comm, candidates, rounds=rounds, repeats=repeats, before=fills)
            for name, seconds in found.items():
                points.append(Point(comm.size, verb, nbytes, name, seconds, found["gloo"]))
    return points


def mpi_points(ranks: int, options: list[str]) -> tuple[list[Point], list[Row]]:
    """Return what a job of this script under mpiexec measures; nothing where there is no MPI."""
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    state = transports.available()["mpi"]
    if program is None or state != "ok":
        print(f"no column mpi: {'no mpiexec' if state == 'ok' else state}")
        return [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "points.json")
        command = [program, "-n", str(ranks), sys.executable, __file__, "--mpi-job", str(path)]
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        subprocess.run([*command, *options], check=True, env={**loopback, **os.environ})
        told = json.loads(path.read_text())
        points = [Point(**fields) for fields in told["points"]]
        return points, [Row(**fields) for fields in told["rows"]]


def mpi_job(path: Path, sizes: tuple[int, ...], quick: bool) -> None:
    """Measure MPI beside gloo and shm on this rank of an MPI job; rank 0 writes what was found."""
    torch.set_num_threads(1)
    world = start_world(detect(), backend="mpi")
    groups = {"gloo": new_group("gloo"), "mpi": new_group("mpi4py")}
    points = [p for p in measure_groups(groups, sizes, quick) if p.transport == "mpi"]
    rows = against_mpi4py(quick)
    if world.rank == 0:
        told = {"points": [asdict(p) for p in points], "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(told))


def against_mpi4py(quick: bool) -> list[Row]:
    """Compare an all_reduce over shared memory with mpi4py's own. Collective over an MPI job."""
    from mpi4py import MPI

    group = new_group("shm")
    comm = Communicator.of(group)
    rows: list[Row] = []
    for nbytes in (KB, MB) if quick else (KB, 64 * KB, MB, 10 * MB, 100 * MB):
        x = torch.zeros(nbytes // 4)  # stays what it is, however often it is added up
        memory = [x.numpy(), MPI.FLOAT]
        candidates = {
            "comm.all_reduce_": lambda x=x: comm.all_reduce_(x),
            "dist.all_reduce": lambda x=x: dist.all_reduce(x, group=group),
            "mpi4py": lambda memory=memory: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, memory, MPI.SUM),
        }
        repeats = 100 if nbytes <= 64 * KB else 10 if nbytes <= MB else 1
        rounds = rounds_for(nbytes, quick)
        found = interleaved(comm, candidates, rounds=rounds, repeats=repeats)
        for name in ("comm.all_reduce_", "dist.all_reduce"):
            case = f"{name} {size_name(nbytes)} over shm, {comm.size} ranks"
            target = MPI_TARGETS.get((comm.size, name, nbytes))
            rows.append(Row(case, found[name], found["mpi4py"], "Allreduce of mpi4py", target))
    return rows


def special_cases(quick: bool) -> list[Row]:
    """Memory speed, the price of not waiting, of operators, and a DDP step. Collective."""
    gloo, shm = new_group("gloo"), new_group("shm")
    comm = Communicator.of(shm)
    rows: list[Row] = []
    n = 10 * MB // 4
    whole, piece, source = torch.ones(n), torch.ones(n // comm.size), torch.ones(n)
    found = interleaved(
        comm,
        {
            "shm": lambda: dist.all_gather_single(whole, piece, group=shm),
            "memcpy": lambda: whole.copy_(source),
        },
        rounds=rounds_for(10 * MB, quick),
    )
    rows.append(
        Row("all_gather 10 MB, 2 ranks", found["shm"], found["memcpy"], "memcpy of 10 MB", 4.0)
    )
    x = torch.ones(256)
    found = interleaved(
        comm,
        {
            "async": lambda: reduced_behind(x, shm).wait(),
            "sync": lambda: dist.all_reduce(x, group=shm),
        },
        rounds=rounds_for(KB, quick),
        repeats=10,
    )
    rows.append(
        Row("async all_reduce 1 KB and wait, 2 ranks", found["async"], found["sync"], "sync", 4.0)
    )
    rows.append(after_idling(gloo, shm, 5 if quick else 40))
    alone = new_group("shm", [dist.get_rank()])
    rows.append(operator_pair(comm, alone, "a group of one", quick))
    rows.append(operator_pair(comm, shm, "2 ranks", quick))
    found = interleaved(
        comm,
        {"shm": ddp_step(shm), "gloo": ddp_step(gloo)},
        rounds=5 if quick else 40,
    )
    rows.append(
        Row("DDP step, MLP 784-1024-1024-10, batch 64, 2 ranks", found["shm"], found["gloo"],
            "DDP over gloo", 0.7)
    )  # fmt: skip
    return rows


def after_idling(gloo: dist.ProcessGroup, shm: dist.ProcessGroup, rounds: int) -> Row:
    """Return the first all_reduce of ranks that have slept: how long once all are there."""
    comm = Communicator.of(shm)
    x = torch.ones(256)
    times = torch.zeros(rounds, 2, dtype=torch.float64)
    for i in range(rounds):
        for j, group in enumerate((shm, gloo)):
            comm.barrier()
            time.sleep(0.02)
            start = time.perf_counter()
            dist.all_reduce(x, group=group)
            times[i, j] = time.perf_counter() - start
    last_to_come = comm.all_reduce(times, "min")
    ours, reference = (statistics.median(last_to_come[:, j].tolist()) for j in (0, 1))
    return Row("all_reduce 1 KB after 20 ms of idling, 2 ranks", ours, reference, "gloo", None)


def reduced_behind(x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all_reduce behind the caller's back."""
    work = dist.all_reduce(x, group=group, async_op=True)
    if work is None:
        raise RuntimeError("this rank is not in the group")
    return work


def operator_pair(comm: Communicator, group: dist.ProcessGroup, where: str, quick: bool) -> Row:
    """Compare all_gather with autograd, forward and backward, with the two bare collectives."""
    members = Communicator.of(group)
    n = 256 // members.size
    x = torch.randn(n, requires_grad=True)
    grad, whole, piece = torch.randn(256), torch.empty(256), torch.empty(n)

    def operator() -> None:
        x.grad = None
        operators.all_gather(x, 0, [n] * members.size, comm=members).backward(grad)

    def bare() -> None:
        dist.all_gather_single(whole, x.detach(), group=group)
        dist.reduce_scatter_single(piece, grad, group=group)

    candidates = {"operator": operator, "bare": bare}
    found = interleaved(comm, candidates, rounds=rounds_for(KB, quick), repeats=20)
    extra, reference = found["operator"] - found["bare"], found["bare"]
    return Row(
        f"operator all_gather 1 KB, forward + backward, {where}",
        found["operator"],
        reference,
        "the two calls of torch.distributed",
        1 + MAX_OPERATOR_S / reference,
        f"{extra * 1e6:+.0f} us, at most {MAX_OPERATOR_S * 1e6:.0f} us more",
    )


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
    rows: list[Row] = []
    for p in points:
        target = TARGETS.get((p.ranks, p.verb, p.nbytes, p.transport))
        if target is None and p.ranks > 2 and p.transport == "shm":
            target = 1.0
        if target is not None:
            case = f"{p.transport} {p.verb} {size_name(p.nbytes)}, {p.ranks} ranks"
            rows.append(Row(case, p.seconds, p.gloo, "gloo", target))
    return rows


def overview(points: list[Point]) -> str:
    """Return one table: gloo's time, and each transport as a ratio to gloo in its own processes."""
    names = list(dict.fromkeys(p.transport for p in points if p.transport != "gloo"))
    found = {(p.ranks, p.verb, p.nbytes, p.transport): p for p in points}
    lines = [
        f"| ranks | verb | size | gloo | {' | '.join(names)} |",
        f"|---|---|---|---:|{'---:|' * len(names)}",
    ]
    for ranks, verb, nbytes in dict.fromkeys((p.ranks, p.verb, p.nbytes) for p in points):
        row = [found.get((ranks, verb, nbytes, name)) for name in names]
        ratios = " | ".join("-" if p is None else f"{p.ratio:.3f}" for p in row)
        gloo = found[ranks, verb, nbytes, "gloo"].seconds
        cell = f"{gloo * 1e6:.0f} us" if gloo < 1e-3 else f"{gloo * 1e3:.2f} ms"
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
    parser = parser_for(__doc__)
    parser.add_argument("--also", nargs="*", default=[], help="further backends to measure")
    parser.add_argument("--mpi-job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (KB, MB) if options.quick else SIZES
    if options.mpi_job is not None:
        mpi_job(options.mpi_job, sizes, options.quick)
        return
    os.environ["UNISONO_BACKEND"] = "gloo"
    os.environ["OMP_NUM_THREADS"] = "1"
    points: list[Point] = []
    against: list[Row] = []
    for ranks in (2, 4):
        points += unisono.run(sweep, sizes, options.quick, tuple(options.also), ranks=ranks)[0]
        mpi, rows = mpi_points(ranks, ["--quick"] if options.quick else [])
        points += mpi
        against += rows
    special = unisono.run(special_cases, options.quick, ranks=2)[0]
    table = markdown([*judged(points), *against, *special])
    text = f"{table}\n\nRatios to gloo:\n\n{overview(points)}"
    publish("Transports", text, write=not options.quick)
    if not options.quick and IS_CHECKOUT:
        draw(points, PICTURE)


if __name__ == "__main__":
    main()

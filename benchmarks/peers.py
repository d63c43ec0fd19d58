"""The same programs under DistDL's and HeAT's names, theirs and ours in turns under one mpiexec.

    python benchmarks/peers.py --distdl PATH --heat PATH [--quick]

PATH is a virtual environment, or a directory in which the package is found. It must run with this
Python, torch and mpi4py; nothing is installed. A peer that is not there is left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import Row, markdown, parser_for, publish, take_turns
from torch import nn

from unisono.comm import Communicator

RANKS = 2
CONVOLUTIONS = {(8, 64): 0.7, (16, 256): 0.9}
"""Channels, and points along each of two dims, with the largest ratio that counts as reached."""
REPARTITION_TARGET = 0.5
STEP_TARGETS = {"MLP": 0.75, "CNN": 0.9}
Step = Callable[[], object]
_trained: list[Any] = []
"""Models that were trained."""


def imported(name: str, path: Path | None) -> Any:
    """Return the peer's package, None where it is not there; says so."""
    if path is not None:
        inside = sorted(path.glob("lib/python*/site-packages"))
        sys.path.append(str(inside[0] if inside else path))  # behind what this Python has itself
    try:
        return importlib.import_module(name)
    except ImportError as error:
        where = "--" + name + " names no place" if path is None else f"not in {path}"
        print(f"{name} is left out: {error} ({where})", flush=True)
        return None


# -- DistDL --------------------------------------------------------------------------------------


def distdl_steps(distdl: Any) -> dict[str, Step]:
    """Return the cases with the names of DistDL; each is forward and backward."""
    from mpi4py import MPI

    everybody = distdl.backend.backend.Partition(MPI.COMM_WORLD)
    strips = everybody.create_cartesian_topology_partition([1, 1, RANKS, 1])
    rows = everybody.create_cartesian_topology_partition([RANKS, 1])
    columns = everybody.create_cartesian_topology_partition([1, RANKS])
    steps: dict[str, Step] = {}
    for channels, points in CONVOLUTIONS:
        layer = distdl.nn.DistributedConv2d(
            strips,
            in_channels=channels,
            out_channels=channels,
            kernel_size=(3, 3),
            padding=(1, 1),
        )
        x = torch.randn(1, channels, points // RANKS, points)
        steps[f"conv {channels}x{points}x{points}"] = differentiated(layer, x)
    move = distdl.nn.Repartition(rows, columns)
    steps["repartition 4 MB"] = differentiated(move, torch.randn(1024 // RANKS, 1024))
    return steps


def differentiated(layer: nn.Module, x: torch.Tensor) -> Step:
    """Return forward and backward of a layer."""
    grad: list[torch.Tensor] = []

    def step() -> None:
        y = layer(x.clone().requires_grad_() * 1.0)  # no leaf: DistDL changes its input
        if not grad:
            grad.append(torch.ones_like(y))
        y.backward(grad[0].clone())

    return step


# -- HeAT ----------------------------------------------------------------------------------------


def heat_steps(ht: Any) -> dict[str, Step]:
    """Return the cases with the names of HeAT; each is one step of data-parallel training."""
    steps: dict[str, Step] = {}
    for kind in STEP_TARGETS:
        for blocking in (True, False):
            torch.manual_seed(0)
            net, x = network(kind)
            inner = torch.optim.SGD(net.parameters(), lr=0.01)
            optimizer = ht.optim.DataParallelOptimizer(inner, blocking)
            model = ht.nn.DataParallel(net, ht.MPI_WORLD, optimizer, blocking)
            name = f"{kind} step{'' if blocking else ', non-blocking'}"
            steps[name] = trained(model, optimizer, x)
            _trained.append(model)
    return steps


def network(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a small network, and a batch for it."""
    if kind == "MLP":
        layers = [
            nn.Linear(256, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        ]
        return nn.Sequential(*layers), torch.randn(32, 256)
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4608, 10)), torch.randn(8, 1, 28, 28)


def trained(model: Any, optimizer: Any, x: torch.Tensor) -> Step:
    """Return one step of training."""

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


# -- both ----------------------------------------------------------------------------------------


def measured(distdl: Path | None, heat: Path | None, quick: bool) -> list[Row]:
    """Return what the ranks of this MPI job find. Collective."""
    from mpi4py import MPI

    from unisono.compat import distdl as our_distdl
    from unisono.compat import heat as our_heat

    rows: list[Row] = []
    comm, rounds = Communicator.of(MPI.COMM_WORLD), 7 if quick else 31
    targets = {f"conv {c}x{n}x{n}": limit for (c, n), limit in CONVOLUTIONS.items()}
    targets["repartition 4 MB"] = REPARTITION_TARGET
    targets |= {f"{kind} step": limit for kind, limit in STEP_TARGETS.items()}
    for name, path, ours, make in (
        ("distdl", distdl, our_distdl, distdl_steps),
        ("heat", heat, our_heat, heat_steps),
    ):
        peer = imported(name, path)
        if peer is None:
            continue
        theirs, mine = make(peer), make(ours)
        for case, step in mine.items():
            turns = {"ours": step, "peer": theirs[case]}
            found = take_turns(comm, turns, rounds=rounds, repeats=20, warm_up=5)
            rows.append(found["ours"].row(case, found["peer"], name, targets.get(case)))
        for kind in STEP_TARGETS if name == "heat" else ():
            turns = {later: mine[f"{kind} step{later}"] for later in ("", ", non-blocking")}
            found = take_turns(comm, turns, rounds=rounds, repeats=20)
            case = f"{kind} step, non-blocking, against blocking"
            rows.append(found[", non-blocking"].row(case, found[""], "blocking", 1.0))
    for model in _trained:
        # Completes the updates under way: MPI would write to their memory while the process ends.
        model.eval()
    return rows


def main() -> None:
    """Start the job under mpiexec and write the table."""
    parser = parser_for(__doc__)
    parser.add_argument("--distdl", type=Path, help="where DistDL is")
    parser.add_argument("--heat", type=Path, help="where HeAT is")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        torch.set_num_threads(1)
        rows = measured(options.distdl, options.heat, options.quick)
        if rows:
            options.job.write_text(json.dumps([asdict(row) for row in rows]))
        return
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        sys.exit("peers.py starts its ranks with mpiexec, and there is none: pip install mpich")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        words = [program, "-n", str(RANKS), sys.executable, __file__, "--job", str(path)]
        for name in ("distdl", "heat"):
            if (given := getattr(options, name)) is not None:
                words += [f"--{name}", str(given.resolve())]
        words += ["--quick"] if options.quick else []
        subprocess.run(words, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        rows = [Row(**fields) for fields in json.loads(path.read_text())]
    if not rows:
        sys.exit("no peer to compare with: --distdl PATH, --heat PATH")
    publish("DistDL and HeAT", markdown(rows), write=not options.quick)


if __name__ == "__main__":
    main()

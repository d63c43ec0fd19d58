"""`unisono demo`: something to look at within two minutes, on the cores of this machine.

The digits compare one rank with many and end in a report: `train` is what a user would write, it
knows nothing of how it was started. The others are the programs of `examples/`, which an installed
package carries along.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import unisono
from unisono.cli.outcome import FAILED, OK
from unisono.errors import MissingExtra, PlatformError

if TYPE_CHECKING:
    from unisono.train.recording.reading import RecordedRun

GLOBAL_BATCH = 256
CLOSE = 1e-2
"""Largest difference of the two loss curves that rounding may make."""


class Demo(NamedTuple):
    """One demo: the program, and what it shows."""

    script: str
    shows: str


DIGITS = "digits"
SLURM = "slurm"
DEMOS = {
    DIGITS: Demo("", "one rank against many on handwritten digits: same loss, faster (default)"),
    "forces": Demo("forces_graph_parallel.py", "forces from an energy; atoms split over ranks"),
    "flow": Demo("flow_domain_parallel.py", "a field in space, its grid split over ranks"),
    "error-bars": Demo("bayes_regression.py", "predictions with error bars, without sampling"),
    "elastic": Demo("elastic_digits.py", "a rank is killed every two seconds: one curve, one hash"),
    "daso": Demo("daso_two_nodes.py", "DASO against DDP over a slow network between nodes"),
    SLURM: Demo("", "the batch script of a SLURM job, shown and not sent"),
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train on real digits and see the report; more with --list",
        description="Train on scikit-learn's digits with one rank and with many, compare them and "
        "write a report. `unisono demo --list` names the other demos.",
    )
    parser.add_argument("name", nargs="?", default=DIGITS, help="which demo (digits)")
    parser.add_argument("--list", action="store_true", help="name the demos and stop")
    parser.add_argument("--on", default="cpu", help="cpu (default), gpu or another place")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (2 to 4, by cores)")
    parser.add_argument("--epochs", type=int, default=16, metavar="N", help="passes over the data")
    parser.add_argument("--debug", action="store_true", help="show the launcher's own traceback")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """List the demos, or run the one that is named."""
    if args.list:
        for name, demo in DEMOS.items():
            print(f"{name:<12}{demo.shows}")
        print("\nunisono demo NAME runs one")
        return OK
    if args.name not in DEMOS:
        near = difflib.get_close_matches(args.name, DEMOS, n=1)
        raise PlatformError.because(
            f"unisono demo {args.name}",
            f"demos: {', '.join(DEMOS)}",
            hint=f"unisono demo {near[0] if near else DIGITS}",
        )
    for option in ("ranks", "epochs"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise PlatformError.because(
                f"unisono demo --{option} {value}", f"fewer {option} than 1", hint=f"--{option} 2"
            )
    if args.name == DIGITS:
        return compare(args.on, args.ranks, args.epochs)
    if args.name == SLURM:
        return _show_batch_script(args.ranks or 4)
    return _run_example(example_path(DEMOS[args.name].script), args.ranks or 2)


def example_path(script: str) -> Path:
    """Return where an example lies: in a checkout, or in the installed package."""
    package = Path(unisono.__file__).parent
    homes = (package / "_examples", package.parents[1] / "examples")
    for home in homes:
        if (home / script).is_file():
            return home / script
    raise PlatformError.because(
        "unisono demo", f"no {script} in {homes[0]} or {homes[1]}", hint="reinstall unisono"
    )


def _run_example(path: Path, ranks: int) -> int:
    """Run an example in an interpreter of its own, as a user would."""
    done = subprocess.run([sys.executable, str(path), "--ranks", str(ranks)], check=False)
    print(f"\nthe program is {path}")
    return OK if done.returncode == 0 else FAILED


def _show_batch_script(ranks: int) -> int:
    """Print what would be sent to a cluster."""
    from unisono.launch import dry_run

    print(dry_run(train, 16, 1, on="slurm", nodes=2, ranks=ranks))
    print("\nunisono run --on slurm --nodes 2 train.py would send such a job and wait for it")
    return OK


class Outcome(TypedDict):
    """What one rank returns."""

    accuracy: float
    spread: float


def compare(on: str, ranks: int | None, epochs: int) -> int:
    """Train on one rank and on many, show both side by side, write the report."""
    if importlib.util.find_spec("sklearn") is None:
        raise MissingExtra.of("examples", "unisono demo trains on the digits of scikit-learn")
    from unisono.cores import usable_cores
    from unisono.train.recording import launching
    from unisono.train.recording.reading import RecordedRun
    from unisono.train.recording.report import build_report

    many = max(2, min(4, usable_cores())) if ranks is None else ranks
    if many < 2:
        raise PlatformError.because(
            f"unisono demo --ranks {many}", "one rank, to be compared with one", hint="--ranks 2"
        )
    threads = max(1, usable_cores() // many)
    load = os.getloadavg()[0]
    print(f"handwritten digits, batches of {GLOBAL_BATCH}, on 1 rank and on {many}", flush=True)
    outcomes: list[Outcome] = []
    runs: list[RecordedRun] = []
    for name, size in (("demo-alone", 1), ("demo", many)):
        outcome, directory = _run(name, on, size, epochs, threads)
        outcomes.append(outcome)
        runs.append(RecordedRun.read(directory))
    page = build_report(runs[1].directory, against=[runs[0].directory])
    is_good = _show(runs, outcomes)
    if load > usable_cores() / 2:
        print(f"\nthis machine was busy before (load {load:.1f}), so its speeds say little")
    where, own = launching.near(page), _command()
    print(f"\nreport in {where}\n\ntry next:")
    for command, what in (
        (f"{own} report {where.parent}", "opens the report"),
        (f"{own} demo --list", "shows more: forces, flow, error bars, DASO, SLURM"),
        (f"{own} run --watch --ranks 2 train.py", "runs your script and shows it in a browser"),
    ):
        print(f"  {command:<{34 + len(own)}} {what}")
    if not is_good:
        print("unisono: the demo did not reach what it should", file=sys.stderr)
    return 0 if is_good else 1


def _command() -> str:
    """Return how to type this command here: by its path, where the shell would not find it."""
    from unisono.train.recording.launching import near

    own = Path(sys.executable).with_name("unisono")
    found = shutil.which("unisono")
    if not own.is_file() or (found is not None and Path(found).resolve() == own.resolve()):
        return "unisono"
    return str(near(own))


def _run(name: str, on: str, ranks: int, epochs: int, threads: int) -> tuple[Outcome, Path]:
    """Train on `ranks` ranks with a record; return what rank 0 did, and the directory."""
    from unisono.launch import run
    from unisono.train.recording import launching
    from unisono.train.recording.directory import begin_run

    directory, started_ns = begin_run(name)
    function = functools.partial(train, epochs, threads)
    results = run(
        launching.call_in_rank, directory, started_ns, function, on=on, ranks=ranks, timeout_s=300
    )
    return results[0], Path(directory)  # pyright: ignore[reportReturnType]


def _show(runs: list[RecordedRun], outcomes: list[Outcome]) -> bool:
    """Print the comparison; return whether it is as it should be."""
    from unisono.train.recording import figures, reading

    losses = [run.merged.series["loss"].mean for run in runs]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    rates = [reading.overall_throughput(run.merged) or 0.0 for run in runs]
    shares = [[row["share"] for row in figures.shares(run.parts, run.lines)] for run in runs]
    spread = outcomes[1]["spread"]
    rows = [
        ("", *(_ranks(len(run.parts)) for run in runs), ""),
        ("samples/s", *(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}x"),
        ("in communication", *(f"{sum(s) / len(s):.1%}" for s in shares), ""),
        ("last loss", *(f"{loss[-1]:.4f}" for loss in losses), f"curves within {apart:.1e}"),
        ("test accuracy", *(f"{one['accuracy']:.1%}" for one in outcomes), ""),
        ("replicas agree", "", "yes" if spread == 0.0 else "NO", f"spread {spread:g}"),
    ]
    print()
    for label, one, many, note in rows:
        print(f"{label:<18}{one:>12}{many:>12}   {note}".rstrip())
    return apart < CLOSE and spread == 0.0 and outcomes[1]["accuracy"] > 0.9


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def train(epochs: int, threads: int) -> Outcome:
    """Train this rank's replica on this rank's share of each batch.

    Collective over the world; every rank gets the same model.
    """
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from tqdm import tqdm

    import unisono
    from unisono.data_parallel import DataParallel
    from unisono.train import current_run, log, span

    torch.set_num_threads(threads)
    comm = unisono.world()
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor((images[order] - 5) / 6, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order])
    steps = len(y) * 4 // 5 // GLOBAL_BATCH
    n_train = steps * GLOBAL_BATCH
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
    model = DataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    if (run := current_run()) is not None:
        run.layout(unisono.Mesh(data=comm.size), [GLOBAL_BATCH], name="rows of each batch")
        run.note_config({"epochs": epochs, "batch": GLOBAL_BATCH, "optimizer": "Adam, lr 0.002"})

    def tested() -> float:
        """Return the accuracy on images not trained on; each rank looks at its share of them."""
        mine = slice(n_train + comm.rank, None, comm.size)
        with torch.no_grad():
            right = (network(x[mine]).argmax(1) == y[mine]).sum()
        return comm.all_reduce(right).item() / (len(y) - n_train)

    progress = tqdm(range(epochs * steps), desc="training", unit="step", disable=comm.rank != 0)
    for step in progress:
        start = step % steps * GLOBAL_BATCH
        mine = slice(start + comm.rank, start + GLOBAL_BATCH, comm.size)
        optimizer.zero_grad()
        with span("forward"):
            # A sum over my rows, so scaled that the mean over ranks is that of the whole batch.
            total = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum")
            loss = total * comm.size / GLOBAL_BATCH
        with span("backward"):
            loss.backward()
        with span("update"):
            optimizer.step()
        log(step=step, loss=loss, samples=len(y[mine]))
        if start + 2 * GLOBAL_BATCH > n_train:  # the last batch of an epoch
            log(step=step, test_accuracy=tested())
    weights = nn.utils.parameters_to_vector(network.parameters()).detach()
    spread = comm.all_reduce(weights, op="max") - comm.all_reduce(weights, op="min")
    return {"accuracy": tested(), "spread": spread.abs().max().item()}

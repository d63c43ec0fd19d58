"""One rank against many on handwritten digits: the same loss, faster. Ends in a report.

`train` is what a user would write: it knows nothing of how it was started.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import unisono
from unisono.cores import usable_cores
from unisono.data_parallel import DataParallel
from unisono.train import current_run, log, span
from unisono.train.recording import figures, reading
from unisono.train.recording.reading import RecordedRun
from unisono.train.recording.report import build_report

BATCH = 256
CLOSE = 1e-2
"""Largest difference of the two loss curves that rounding may make."""


def train(epochs: int, threads: int) -> dict[str, float]:
    """Train this rank's replica on its share of each batch; every rank gets the same model."""
    torch.set_num_threads(threads)
    comm = unisono.world()
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor((images[order] - 5) / 6, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order])
    steps = len(y) * 4 // 5 // BATCH
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    model = DataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    if (run := current_run()) is not None:
        run.note_config({"epochs": epochs, "batch": BATCH, "optimizer": "Adam, lr 0.002"})

    def tested() -> float:
        """Return the accuracy on images not trained on; each rank looks at its share of them."""
        mine = slice(steps * BATCH + comm.rank, None, comm.size)
        with torch.no_grad():
            right = (network(x[mine]).argmax(1) == y[mine]).sum()
        return comm.all_reduce(right).item() / (len(y) - steps * BATCH)

    progress = tqdm(range(epochs * steps), desc="training", unit="step", disable=comm.rank != 0)
    for step in progress:
        start = step % steps * BATCH
        mine = slice(start + comm.rank, start + BATCH, comm.size)
        optimizer.zero_grad()
        with span("forward"):
            # A sum over my rows, so scaled that the mean over ranks is that of the whole batch.
            total = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum")
            loss = total * comm.size / BATCH
        with span("backward"):
            loss.backward()
        with span("update"):
            optimizer.step()
        log(step=step, loss=loss, samples=len(y[mine]))
        if step % steps == steps - 1:
            log(step=step, test_accuracy=tested())
    weights = nn.utils.parameters_to_vector(network.parameters()).detach()
    spread = comm.all_reduce(weights, op="max") - comm.all_reduce(weights, op="min")
    return {"accuracy": tested(), "spread": spread.abs().max().item()}


def show(runs: list[RecordedRun], outcomes: list[dict[str, float]]) -> bool:
    """Print both runs side by side; return whether they are as they should be."""
    losses = [run.merged.series["loss"].mean for run in runs]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    rates = [reading.overall_throughput(run.merged) or 0.0 for run in runs]
    shares = [[row["share"] for row in figures.shares(run.parts, run.lines)] for run in runs]
    spread = outcomes[1]["spread"]
    for label, one, many, note in (
        ("", "1 rank", f"{len(runs[1].parts)} ranks", ""),
        ("samples/s", *(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}x"),
        ("in communication", *(f"{sum(s) / len(s):.1%}" for s in shares), ""),
        ("last loss", *(f"{loss[-1]:.4f}" for loss in losses), f"curves within {apart:.1e}"),
        ("test accuracy", *(f"{outcome['accuracy']:.1%}" for outcome in outcomes), ""),
        ("replicas agree", "", "yes" if spread == 0.0 else "NO", f"spread {spread:g}"),
    ):
        print(f"{label:<18}{one:>12}{many:>12}   {note}".rstrip())
    return apart < CLOSE and spread == 0.0 and outcomes[1]["accuracy"] > 0.9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default="cpu")
    parser.add_argument("--ranks", type=int, default=max(2, min(4, usable_cores())))
    parser.add_argument("--epochs", type=int, default=16)
    args = parser.parse_args()
    threads, load = max(1, usable_cores() // args.ranks), os.getloadavg()[0]
    print(f"handwritten digits, batches of {BATCH}, on 1 rank and on {args.ranks}", flush=True)
    results = [
        unisono.run(train, args.epochs, threads, on=args.on, ranks=n, record=name, timeout_s=300)
        for name, n in (("demo-alone", 1), ("demo", args.ranks))
    ]
    alone, many = (each.report.dir for each in results)
    page = build_report(many, against=[alone])
    is_good = show([RecordedRun.read(alone), RecordedRun.read(many)], [r[0] for r in results])
    if load > usable_cores() / 2:
        print(f"\nthis machine was busy before (load {load:.1f}), so its speeds say little")
    print(f"\nreport in {Path(os.path.relpath(page))}")
    sys.exit(0 if is_good else "the demo did not reach what it should")

"""`unisono demo`: train a classifier on real digits, on several ranks, in a few seconds.

The data ship inside scikit-learn's wheel. `train` is what a user would write: it knows nothing of
how it was started.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from typing import TypedDict

from unisono.errors import MissingExtra

GLOBAL_BATCH = 64


class Report(TypedDict):
    """What one rank returns."""

    accuracy: float
    samples_per_s: float
    spread: float
    parameters: list[float]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a small classifier on real digits",
        description="Train a small classifier on scikit-learn's digits, on several ranks.",
    )
    parser.add_argument("--on", default="cpu", help="cpu (default) or inline")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (2)")
    parser.add_argument("--epochs", type=int, default=15, metavar="N", help="passes over the data")
    parser.add_argument("--debug", action="store_true", help="show the launcher's own traceback")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Train on the ranks asked for, then in this process, and compare."""
    if importlib.util.find_spec("sklearn") is None:
        raise MissingExtra.of("examples", "unisono demo trains on the digits of scikit-learn")
    import torch

    from unisono.launch import run

    results = run(train, args.epochs, on=args.on, ranks=args.ranks, timeout_s=300)
    before = torch.get_num_threads()
    torch.set_num_threads(results.threads)  # as many as a rank has, so that speeds compare
    try:
        alone = run(train, args.epochs, False, on="inline")[0]
    finally:
        torch.set_num_threads(before)
    first = results[0]
    difference = max(
        abs(a - b) for a, b in zip(first["parameters"], alone["parameters"], strict=True)
    )
    print(f"test accuracy      {first['accuracy']:.1%} on {results.ranks} ranks ({args.on})")
    ratio = first["samples_per_s"] / alone["samples_per_s"]
    print(f"speed              {first['samples_per_s']:,.0f} samples/s, {ratio:.2f}x of one rank")
    print(f"replicas agree     {_verdict(first['spread'] == 0.0)}: spread {first['spread']:g}")
    print(f"as in one process  {_verdict(difference < 1e-3)}: largest difference {difference:.1e}")
    good = first["accuracy"] > 0.9 and first["spread"] == 0.0 and difference < 1e-3
    if not good:
        print("unisono: the demo did not reach what it should", file=sys.stderr)
    return 0 if good else 1


def _verdict(is_so: bool) -> str:
    return "yes" if is_so else "NO"


def train(epochs: int, show_progress: bool = True) -> Report:
    """Train this rank's replica on this rank's share of each batch.

    Collective over the world; every rank gets the same model.
    """
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from tqdm import tqdm

    import unisono

    comm = unisono.world()
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order] / 16, dtype=torch.float32)
    y = torch.tensor(labels[order])
    n_train = len(y) * 4 // 5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = n_train // GLOBAL_BATCH

    begin = time.perf_counter()
    is_quiet = comm.rank != 0 or not show_progress
    for step in tqdm(range(epochs * steps), desc="training", unit="step", disable=is_quiet):
        start = step % steps * GLOBAL_BATCH
        mine = slice(start + comm.rank, start + GLOBAL_BATCH, comm.size)
        optimizer.zero_grad()
        # A sum over my part divided by the whole batch: the ranks' gradients add up to its mean.
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine], reduction="sum")
        (loss / GLOBAL_BATCH).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = comm.all_reduce_(nn.utils.parameters_to_vector(gradients))
        nn.utils.vector_to_parameters(flat, gradients)
        optimizer.step()
    seconds = time.perf_counter() - begin

    with torch.no_grad():
        right = (model(x[n_train:]).argmax(1) == y[n_train:]).float().mean().item()
        weights = nn.utils.parameters_to_vector(model.parameters())
        spread = comm.all_reduce(weights, op="max") - comm.all_reduce(weights, op="min")
    return {
        "accuracy": right,
        "samples_per_s": epochs * steps * GLOBAL_BATCH / seconds,
        "spread": spread.abs().max().item(),
        "parameters": weights.tolist(),
    }

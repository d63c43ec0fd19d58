"""Ranks are killed while they train on digits, and the weights have the hash of an undisturbed run.

Every two seconds one rank gets `kill -9`. Others do its shards of the step, a new rank takes its
place, and neither the curve nor the last bit of a weight tells of it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono


def train(
    epochs: int, pause_s: float = 0.0, folder: str | None = None
) -> tuple[list[float], str, float]:
    if folder is not None:
        Path(folder, str(os.getpid())).touch()  # who can be killed
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses: list[float] = []
    data = x[:1500], y[:1500]
    run = unisono.train.elastic(model, optimizer, data, batch_size=125, shards=4, epochs=epochs)
    run.state(losses=losses)  # a rank that joins later gets the curve so far
    for step in run:
        step(lambda batch: nn.functional.cross_entropy(model(batch.x), batch.y))
        losses.append(step.loss)
        time.sleep(pause_s)
    model.eval()
    right = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return losses, found.hexdigest()[:16], right


def kill_one(directory: Path) -> int | None:
    """Kill one of the ranks that have left their process number; return the number."""
    paths = list(directory.iterdir())
    if not paths:
        return None
    path = random.choice(paths)
    path.unlink()
    with suppress(ProcessLookupError):
        os.kill(int(path.name), signal.SIGKILL)
        return int(path.name)
    return None


def drawn(losses: list[float], width: int = 60) -> str:
    """Draw a curve in one line of text."""
    marks = "▁▂▃▄▅▆▇█"
    picked = losses[:: max(1, len(losses) // width)]
    return "".join(marks[min(7, int(8 * loss / max(losses)))] for loss in picked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0, help="from one kill to the next")
    options = parser.parse_args()
    alone, expected, right = train(options.epochs)
    print(f"{'one process, undisturbed':<26}{drawn(alone)}  {expected}", flush=True)
    pause_s = 4.5 * options.seconds / len(alone)  # long enough for a few kills
    kills = 0
    with tempfile.TemporaryDirectory() as folder:
        words = (options.epochs, pause_s, folder)
        job = unisono.submit(train, *words, ranks=options.ranks, elastic=True)
        while not job.wait(options.seconds):
            if job.members() > 1 and (process := kill_one(Path(folder))) is not None:
                kills += 1
                print(f"{f'kill -9 of {process}':<26}(one of {options.ranks})", flush=True)
    for rank, (losses, found, _) in enumerate(job.result()):
        print(f"{f'rank {rank}, after {kills} kills':<26}{drawn(losses)}  {found}")
        if (losses, found) != (alone, expected):
            raise SystemExit("the bits differ")
    print(f"{kills} kills, one curve, one hash, {right:.1%} right")


if __name__ == "__main__":
    main()

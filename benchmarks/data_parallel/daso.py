"""DASO against torch's DDP over a slow link: 2 nodes x 2 ranks, digits, to the same loss.

    python benchmarks/data_parallel/daso.py [--quick]

Both train the same model with the same batches and learning rates, in turns epoch by epoch. What is
compared is the whole training, warm-up and cool-down included.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from harness import Row, markdown, parser_for, publish
from slow_link import TwoNodes, ddp_hook, timed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.data_parallel import DASO, DataParallelMultiGPU, shard

BATCHES = 22
LR, DECAY, HIDDEN = 0.1, 1e-2, 64
Epoch = Callable[[int], None]


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels, as many as four ranks can share."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:1796], dtype=torch.float32) / 16, torch.tensor(labels[:1796])


def contestant(kind: str, epochs: int) -> tuple[nn.Module, Epoch, DASO | None]:
    """Return a model, a function that trains it for one epoch, and its DASO if it has one."""
    x, y = map(shard, digits())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10))
    inner = torch.optim.SGD(model.parameters(), LR, momentum=0.9, weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, epochs * BATCHES)
    daso: DASO | None = None
    if kind == "DASO":
        daso = DASO(
            inner,
            epochs,
            TwoNodes.of(None),
            warmup_epochs=1,
            cooldown_epochs=1,
            scheduler=scheduler,
            stability_level=0.0,
            max_global_skips=4,
            ranks_per_node=2,
        )
        daso.last_batch = BATCHES
        replica: nn.Module = DataParallelMultiGPU(model, daso)
    else:
        replica = DistributedDataParallel(model)
        replica.register_comm_hook(None, ddp_hook)

    def epoch(number: int) -> None:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(number))
        total = 0.0
        for rows in order.chunk(BATCHES):
            inner.zero_grad()
            loss = cross_entropy(replica(x[rows]), y[rows])
            loss.backward()
            total += loss.item() / BATCHES
            if daso is not None:
                daso.step()
            else:
                inner.step()
                scheduler.step()
        if daso is not None:
            daso.epoch_loss_logic(total)

    return model, epoch, daso


def measure(epochs: int) -> dict[str, list[float]]:
    """Train both and return seconds, bytes and losses; the slowest rank counts."""
    torch.set_num_threads(1)
    comm = unisono.world()
    kinds = {kind: contestant(kind, epochs) for kind in ("DDP", "DASO")}
    daso = kinds["DASO"][2]
    found: dict[str, list[float]] = {"skips": []}
    for number in range(epochs):
        found["skips"].append(float(daso.global_skip) if daso else 0.0)
        for kind, (_, epoch, _) in kinds.items():
            seconds, nbytes = timed(lambda epoch=epoch, number=number: epoch(number))
            slowest = comm.all_reduce(torch.tensor([seconds], dtype=torch.float64), "max").item()
            found.setdefault(f"{kind} s", []).append(slowest)
            # Each exchange passes through one rank of a node; DDP's through all alike.
            node = torch.tensor([float(nbytes)], dtype=torch.float64)
            share = comm.all_reduce(node).item() / (comm.size if kind == "DDP" else 2)
            found.setdefault(f"{kind} bytes", []).append(share)
    if not all(found["DASO bytes"]):
        raise RuntimeError("DASO's messages have not passed the link")
    x, y = digits()
    for kind, (model, _, _) in kinds.items():
        with torch.no_grad():
            found[f"{kind} loss"] = [cross_entropy(model(x), y).item()]
    return found


def report(found: dict[str, list[float]]) -> str:
    """Return the tables."""
    cycling = [i for i, skip in enumerate(found["skips"]) if skip == 4]
    pairs = [(found["DASO s"][i], found["DDP s"][i]) for i in cycling]
    loss, reference = found["DASO loss"][0], found["DDP loss"][0]
    epochs = len(found["skips"])
    rows = [
        Row(
            f"digits, {epochs} epochs with warm-up and cool-down, 2 nodes x 2 ranks",
            sum(found["DASO s"]),
            sum(found["DDP s"]),
            "DDP, same link",
            1 / 1.8,
            f"{sum(found['DDP s']) / sum(found['DASO s']):.2f}x faster",
        ),
        Row(
            "an epoch with global_skip 4",
            statistics.median(ours for ours, _ in pairs),
            statistics.median(theirs for _, theirs in pairs),
            "DDP, same link",
            None,
        ),
    ]
    ours = statistics.median(found["DASO bytes"][i] for i in cycling)
    theirs = statistics.median(found["DDP bytes"][i] for i in cycling)
    less = "ok" if ours <= 0.3 * theirs else "MISSED"
    equal = "ok" if abs(loss / reference - 1) <= 0.02 else "MISSED"
    sent = f"{ours / 1e6:.3f} MB | {theirs / 1e6:.3f} MB | {ours / theirs:.2f}"
    losses = f"{loss:.4f} | {reference:.4f} | {loss / reference:.3f}"
    lines = [
        "\n\n| over the link | DASO | DDP | ratio | target | verdict |",
        "|---|---:|---:|---:|---:|---|",
        f"| bytes of an epoch, skips (4, 1, 1) | {sent} | <= 0.30 | {less} |",
        f"| final loss | {losses} | 0.98 to 1.02 | {equal} |",
    ]
    return markdown(rows) + "\n".join(lines)


def main() -> None:
    """Run and write the tables."""
    quick = parser_for(__doc__).parse_args().quick
    os.environ["UNISONO_BACKEND"] = "gloo"
    os.environ["OMP_NUM_THREADS"] = "1"
    found = unisono.run(measure, 5 if quick else 20, ranks=4, timeout_s=1200)[0]
    publish("DASO over a slow link", report(found), write=not quick)


if __name__ == "__main__":
    main()

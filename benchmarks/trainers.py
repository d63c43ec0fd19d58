"""Lightning's Trainer on two CPU ranks: the same program over shared memory and over gloo.

The step is small on purpose: what differs is how gradients travel.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from itertools import pairwise

import torch
from harness import Row, markdown, parser_for, publish
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

STEPS = 60


def train(backend):
    """Return the seconds of a step, the median over all but the first few."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    class Task(lightning.LightningModule):
        """A network of two hidden layers, and the moments at which its steps begin."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
            )
            self.moments = []

        def training_step(self, batch, _):
            """Return the loss."""
            self.moments.append(time.perf_counter())
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            """Return the optimizer."""
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task, size = Task(), unisono.world().size
    count = 32 * STEPS * size
    rows = TensorDataset(torch.randn(count, 784), torch.randint(10, (count,)))
    lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task, DataLoader(rows, 32))
    later = task.moments[5:]
    return statistics.median(b - a for a, b in pairwise(later))


def main():
    """Measure both in turns and write the table."""
    quick = parser_for(__doc__).parse_args().quick
    took = {"shm": [], "gloo": []}
    for _ in range(2 if quick else 7):
        for backend, seconds in took.items():
            on = unisono.Platform(device="cpu", ranks=2, backend=backend)
            seconds.append(max(unisono.run(train, backend, on=on)))
    ours, theirs = (statistics.median(seconds) for seconds in took.values())
    row = Row("Lightning Trainer, MLP, batch 32, 2 ranks", ours, theirs, "gloo", 0.9)
    publish("Trainers of others", markdown([row]), write=not quick)


if __name__ == "__main__":
    main()

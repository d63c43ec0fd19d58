"""Elastic ranks of this host: what the launcher makes of deaths."""

from __future__ import annotations

import os
import signal
import time

import torch

import unisono


def test_results_are_in_the_order_of_ranks_although_one_was_replaced(tmp_path):
    def train():
        rank, has_died = os.environ["RANK"], tmp_path / "has-died"
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.ones(16, 2)
        run = unisono.train.elastic(model, optimizer, data, batch_size=8, shards=2, steps=100)
        for step in run:
            step(lambda batch: model(batch[0]).mean())
            if rank == "0" and not has_died.exists():
                has_died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.0 if run.members == 2 else 0.1)  # until there is another
        return rank

    quiet = unisono.Logs(console="none")
    results = unisono.run(train, on="cpu", ranks=2, elastic=True, logs=quiet, timeout_s=60)
    assert list(results) == ["0", "1"]

"""A training that may be preempted at any step, and then goes on, even on other ranks.

    python examples/checkpoint_resume.py
    unisono run --record --ranks 2 examples/checkpoint_resume.py

The loop saves when it is asked to stop and is started again by the launcher. In the end one process
opens what the ranks have saved. Under the command all of it is done by the ranks that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono
from unisono.data_parallel import DataParallel
from unisono.launch import simulate_preemption
from unisono.train import Checkpoint, Resumable


def build():
    comm = unisono.world()
    x = torch.randn(1536, 16, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, x.abs()[:, :4].argmax(1))
    sampler = DistributedSampler(rows, comm.size, comm.rank, seed=1)
    loader = Resumable(DataLoader(rows, 128 // comm.size, sampler=sampler))
    torch.manual_seed(0)
    model = DataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}


def train(directory, epochs, preempt_at=None):
    state = build()
    model, optimizer, loader = state["model"], state["optimizer"], state["loader"]
    with Checkpoint(directory, keep=2, asynchronous=True) as checkpoint:
        restored = checkpoint.restore(**state)  # None in the first life
        step, losses = (restored.step, restored["losses"]) if restored else (0, [])
        while loader.epoch < epochs:
            for x, y in loader:  # after a restart: what is left of the epoch
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                state["scheduler"].step()
                step += 1
                losses.append(model.communicator.all_reduce(loss.detach(), "mean").item())
                if step == preempt_at and unisono.restart_count() == 0:
                    simulate_preemption()
                stop = unisono.should_stop()
                if stop or step % 10 == 0:
                    checkpoint.save(step, losses=losses, **state)
                if stop:
                    checkpoint.wait()
                    unisono.requeue()
        checkpoint.save(step, losses=losses, **state)
    return losses


def directory_of_all_attempts():
    """The run's own, which all ranks see, where this process is a rank that may start again."""
    own = unisono.job_dir()
    return contextlib.nullcontext(own) if own else tempfile.TemporaryDirectory()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    with directory_of_all_attempts() as directory:
        smooth = unisono.run(train, f"{directory}/smooth", 3, ranks=ranks)[0]
        broken = unisono.run(train, f"{directory}/broken", 3, preempt_at=17, ranks=ranks)
        restarts = broken.restarts + unisono.restart_count()
        print(f"{len(smooth)} steps in {restarts + 1} attempts, loss {broken[0][-1]:.4f}")
        assert restarts == 1
        assert broken[0] == smooth, "the curves differ"
        state = build()  # a plain process is a world of one rank
        restored = Checkpoint(f"{directory}/broken").restore(**state)
        size = unisono.world().size
        print(f"step {restored.step}, saved on {restored.ranks} ranks, restored on {size}")
        assert restored["losses"] == smooth
        assert state["loader"].epoch == 3


main()

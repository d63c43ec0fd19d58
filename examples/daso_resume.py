"""Stop a DASO run in the middle of an epoch and continue it bit for bit.

    python examples/daso_resume.py --ranks 2

Each rank writes its own file: what it had received, but not yet used, differs from rank to rank.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import unisono
from unisono.data_parallel import DASO, DataParallelMultiGPU, shard

EPOCHS, BATCHES = 3, 8


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    daso = DASO(optimizer, EPOCHS, warmup_epochs=1, cooldown_epochs=1, ranks_per_node=1)
    daso.last_batch = BATCHES
    return DataParallelMultiGPU(model, daso), daso


def train(replica, daso, stop_after=None):
    """Train from wherever `daso` stands; stop after so many batches if told."""
    images, labels = load_digits(return_X_y=True)
    x, y = shard(torch.tensor(images[:1796]).float() / 16), shard(torch.tensor(labels[:1796]))
    done = 0
    while daso.epoch < EPOCHS:
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(daso.epoch))
        for rows in order.chunk(BATCHES)[daso.current_batch :]:
            daso.zero_grad()
            loss = cross_entropy(replica(x[rows]), y[rows])
            loss.backward()
            daso.step()
            done += 1
            if done == stop_after:
                return loss.item()
        daso.epoch_loss_logic(loss)
    return loss.item()


def first_part(directory, stop_after):
    """Train to the end, then once more up to a point where everything is saved."""
    replica, daso = build()
    result = train(replica, daso), [p.detach() for p in replica.parameters()]
    replica, daso = build()
    train(replica, daso, stop_after)
    state = {"model": replica.module.state_dict(), "daso": daso.state_dict()}
    torch.save(state, Path(directory) / f"rank{daso.communicator.rank}.pt")
    daso.print0(
        f"stopped in epoch {daso.epoch} before batch {daso.current_batch}, "
        f"with an exchange of batch {daso.sent_at} in flight"
    )
    return result


def second_part(directory):
    replica, daso = build()
    state = torch.load(Path(directory) / f"rank{daso.communicator.rank}.pt", weights_only=True)
    replica.module.load_state_dict(state["model"])
    daso.load_state_dict(state["daso"])
    return train(replica, daso), [p.detach() for p in replica.parameters()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as directory:
        whole = unisono.run(first_part, directory, BATCHES + 5, ranks=ranks)
        resumed = unisono.run(second_part, directory, ranks=ranks)
    for (loss, params), (other_loss, other_params) in zip(resumed, whole, strict=True):
        assert loss == other_loss
        assert all(torch.equal(a, b) for a, b in zip(params, other_params, strict=True))
    print(f"continued to the same loss, {whole[0][0]:.6f}, and the same bits on {ranks} ranks")


if __name__ == "__main__":
    main()

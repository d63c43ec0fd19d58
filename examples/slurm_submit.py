"""Submit a job, follow it, get its results: `python examples/slurm_submit.py --on cluster`.

The profiles `cluster` and `rehearsal` are in `unisono.toml` beside this file. Without a cluster the
same job runs on processes of this host.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.launch.places.slurm import cluster


def train(folder, steps):
    """Fit a plane; when asked to stop, save and start again later. Returns losses and attempt."""
    comm = unisono.world()
    checkpoint = Path(folder, "checkpoint.pt")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    losses = []
    if unisono.restart_count() and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        losses = saved["losses"]
    for step in range(len(losses), steps):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(step))[
            comm.rank :: comm.size
        ]
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * comm.all_reduce(parameter.grad) / comm.size
        losses.append(comm.all_reduce(loss.detach()).item() / comm.size)
        if comm.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
        if unisono.should_stop(every=5):
            if comm.rank == 0:
                torch.save({"model": model.state_dict(), "losses": losses}, checkpoint)
            unisono.requeue()
    return losses, unisono.restart_count()


def has_cluster():
    try:
        return bool(cluster.partitions(timeout_s=10.0))
    except unisono.errors.PlatformError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", help="a profile: cluster or rehearsal")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    on = options.on or ("cluster" if has_cluster() else "rehearsal")
    folder = Path("runs").absolute()
    folder.mkdir(exist_ok=True)
    os.chdir(Path(__file__).resolve().parent)  # where unisono.toml is

    print(unisono.launch.dry_run(train, str(folder), 40, on=on, ranks=options.ranks))
    job = unisono.submit(train, str(folder), 40, on=on, ranks=options.ranks, logs=folder)
    print(f"job {job.id} is {job.status()}; its directory is {job.dir}")
    for line in job.logs(0, follow=True):
        print(f"  {line}")
    results = job.result()
    losses, attempt = results[0]
    print(f"{results.ranks} ranks on {', '.join(results.hosts)}, attempt {attempt}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.1 * losses[0]


main()

"""Train on two ranks that are killed again and again, and print what came of it as JSON.

A program of its own: it loads torch once and forks the ranks of each life, which is quick enough
to kill many of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono.comm import world
from unisono.data_parallel import DataParallel
from unisono.train import Checkpoint, Resumable

KILLS, STEPS, STEPS_A_LIFE, RANKS = 8, 16, 1, 2


def train(directory, life, lives):
    """Train with a save after every step; in a life that is to end early, save until killed."""
    comm = world()
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))[comm.rank :: comm.size]
    torch.manual_seed(comm.rank)
    loader = Resumable(DataLoader(TensorDataset(rows), batch_size=4, shuffle=True))
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    model = DataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    objects = {"model": model, "optimizer": optimizer, "loader": loader}
    with Checkpoint(directory / "saved", keep=2, asynchronous=life % 2 == 1) as checkpoint:
        restored = checkpoint.restore(**objects)
        step = restored.step if restored else 0
        losses = restored["losses"] if restored else []
        (directory / f"begun-{life}").touch()
        while step < STEPS:
            for (x,) in loader:
                optimizer.zero_grad()
                loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                step += 1
                losses = [*losses, comm.all_reduce(loss.detach(), "mean").item()]
                checkpoint.save(step, **objects, losses=losses)
                while life < lives and step >= STEPS_A_LIFE * (life + 1):
                    (directory / f"saved-{life}").touch()
                    checkpoint.save(step, **objects, losses=losses)
                if step == STEPS:
                    break
    if comm.rank == 0:
        (directory / "losses.json").write_text(json.dumps(losses))


def start(directory, life, lives):
    """Fork the ranks of one life."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                store = f"file://{directory}/store-{life}"
                limit = timedelta(seconds=120)
                dist.init_process_group("gloo", store, limit, RANKS, rank)
                train(directory, life, lives)
                dist.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    return pids


def end(pids):
    """Wait for all ranks; return how they ended."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kill(directory, life, pids, moments):
    """Kill a life at a moment that is not its choice: one rank, then the other."""
    awaited = directory / f"{'saved' if moments.random() < 0.7 else 'begun'}-{life}"
    while not awaited.exists():
        if os.waitpid(pids[0], os.WNOHANG)[0]:
            raise SystemExit(f"rank 0 of life {life} ended by itself")
        time.sleep(0.002)
    time.sleep(moments.uniform(0.0, 0.1))
    moments.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(moments.choice([0.0, 0.05]))
    codes = end(pids)
    if codes != [-signal.SIGKILL] * RANKS:
        raise SystemExit(f"life {life} ended with {codes}")


def main():
    directory = Path(sys.argv[1])
    quiet = directory / "quiet"
    quiet.mkdir()
    torch.set_num_threads(1)
    weight = torch.ones(1)
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight]).step()  # loads what each rank would load for itself
    if any(end(start(quiet, 0, 0))):
        raise SystemExit("the undisturbed run failed")
    moments, interrupted = random.Random(0), 0
    for life in range(KILLS):
        kill(directory, life, start(directory, life, KILLS), moments)
        interrupted += any((directory / "saved").glob(".*"))
    if any(end(start(directory, KILLS, KILLS))):
        raise SystemExit("the last life failed")
    print(
        json.dumps(
            {
                "expected": json.loads((quiet / "losses.json").read_text()),
                "losses": json.loads((directory / "losses.json").read_text()),
                "interrupted saves": interrupted,
                "left": sorted(path.name for path in (directory / "saved").iterdir()),
            }
        )
    )


if __name__ == "__main__":
    main()

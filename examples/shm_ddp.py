"""torch's own DDP on shared memory and on gloo, the same model in one run: what a step costs.

Prints the ratio of the median step times. The losses are equal, since the sums are.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono


def train(steps):
    torch.set_num_threads(1)
    comm = unisono.world()
    groups = {name: dist.new_group(backend=name) for name in ("shm", "gloo")}
    data = torch.Generator().manual_seed(comm.rank)
    x, y = torch.randn(64, 784, generator=data), torch.randint(0, 10, (64,), generator=data)
    models, times, losses = {}, {name: [] for name in groups}, {}
    for name, group in groups.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
        model = DistributedDataParallel(net, process_group=group)
        models[name] = model, torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for name, (model, optimizer) in models.items():  # in turns: noise hits both alike
            comm.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            times[name].append(time.perf_counter() - start)
            losses[name] = loss.item()
    return {name: (statistics.median(times[name]), losses[name]) for name in groups}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    measured = unisono.run(train, options.steps, ranks=options.ranks)[0]
    for name, (seconds, loss) in measured.items():
        print(f"{name:5} {seconds * 1e3:6.2f} ms a step, loss {loss:.4f}")
    print(f"shm takes {measured['shm'][0] / measured['gloo'][0]:.2f} of gloo's time")


if __name__ == "__main__":
    main()

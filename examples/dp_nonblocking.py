"""The same loop twice, blocking and non-blocking: equal parameters, and how long each one waited.

Non-blocking, `step()` returns while gradients still travel; a layer is updated just before its
next forward.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import unisono
from unisono.data_parallel import DataParallel, DataParallelOptimizer


def train(blocking, steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    comm = unisono.world()
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    net = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer = DataParallelOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    model = DataParallel(net, comm, optimizer, blocking_parameter_updates=blocking, bucket_mb=1.0)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    model.eval()  # the last owed update is applied here
    return model.stats(), torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    ends = {}
    for name, blocking in (("blocking", True), ("non-blocking", False)):
        results = unisono.run(train, blocking, options.steps, ranks=options.ranks)
        stats, ends[name] = results[0]
        assert all(torch.equal(ends[name], end) for _, end in results), "replicas are equal"
        print(f"{name:12} {stats}")
    difference = (ends["blocking"] - ends["non-blocking"]).abs().max()
    assert difference < 1e-6
    print(f"largest difference of a parameter: {difference:.1e}")


if __name__ == "__main__":
    main()

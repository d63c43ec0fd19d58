"""A DDPW program, in both of its spellings, on ranks of this host.

    python examples/launch_ddpw.py

Only the import line differs from the original; `device="gpu"` becomes processes on a laptop with
`UNISONO_FORCE_ON=cpu`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unisono.compat.ddpw import Platform, Wrapper, wrapper
from unisono.compat.ddpw import functional as DF


def early(global_rank, local_rank, process_group, args):
    """Take what the first releases hand over."""
    print(f"rank {global_rank} (local {local_rank}) got {args}")
    total = torch.tensor([float(global_rank)])
    dist.all_reduce(total, group=process_group)
    return total.item()


@wrapper(Platform(device="cpu", n_gpus_per_node=2, verbose=False))
def train(epochs, global_rank, local_rank, group, platform):
    """Take what the present release hands over, by name."""
    x = torch.linspace(-1, 1, 64)[:, None]
    dataset = TensorDataset(x, 3 * x + 1)
    sampler = DF.get_dataset_sampler(dataset, global_rank, platform)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DF.to(nn.Linear(1, 1), local_rank)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimiser.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimiser.step()
    dist.barrier(group)
    return [model.module.weight.item(), model.module.bias.item()]


def main():
    platform = Platform(device="cpu", n_gpus=2)
    assert list(Wrapper(platform=platform).start(early, ("example",))) == [1.0, 1.0]
    first, second = train(20)
    assert first == second, "the replicas differ"
    print(f"learned y = {first[0]:.2f} x + {first[1]:.2f}")
    assert abs(first[0] - 3) < 0.1


main()

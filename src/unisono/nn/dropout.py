"""Dropout with a generator of its own: apart where ranks hold different points, else equal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unisono.nn.parameters import shared_generator
from unisono.topology import Partition


class OwnDropout(nn.Module):
    """`torch.nn.Dropout` whose masks do not depend on what else a rank draws.

    Args:
        p: probability of a zero.
        partition: the ranks.
        place: ranks with the same number draw the same masks, others their own.
    """

    def __init__(self, p: float, partition: Partition, place: int) -> None:
        super().__init__()
        self.p = p
        comm = partition.comm if partition.active and partition.root.size > 1 else None
        with shared_generator(comm) as generator:
            seed = int(torch.randint(2**62, (), generator=generator))
        self._generator = torch.Generator()
        self._generator.manual_seed(seed + place)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with elements zeroed in training, scaled to keep its mean."""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        kept = torch.rand(x.shape, generator=self._generator) >= self.p
        return x * kept.to(device=x.device, dtype=x.dtype) / (1.0 - self.p)

"""Dropout with a generator of its own: apart where ranks hold different points, else equal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unisono.nn.drawing import Draws
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
        self._draws = Draws(partition, place)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` with elements zeroed in training, scaled to keep its mean."""
        if not self.training or self.p == 0.0:
            return input
        if self.p == 1.0:
            return input * 0.0
        generator = self._draws.generator(self._draws.next_call())
        kept = torch.rand(self._mask_shape(input), generator=generator) >= self.p
        return input * kept.to(device=input.device, dtype=input.dtype) / (1.0 - self.p)

    def _mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return how many numbers are drawn: one for each element."""
        return tuple(x.shape)


class OwnChannelDropout(OwnDropout):
    """`torch.nn.Dropout1d/2d/3d` of `(N, C, ...)`: ranks with parts of a sample draw the same.

    Args:
        p: probability of a zero.
        partition: the ranks.
        place: a number that ranks share where they hold the same samples.
    """

    def _mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return how many numbers are drawn: one for each channel of a sample."""
        return (*x.shape[:2], *(1,) * (x.dim() - 2))

"""`GlobalAvgPool`: the mean over all of space, as a value that every rank of it shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from unisono.nn.planned import PlannedModule
from unisono.nn.structure import Table
from unisono.operators import sum_to_replicated
from unisono.topology import Partition


class GlobalAvgPool(PlannedModule[int]):
    """`torch.nn.AdaptiveAvgPool1d/2d/3d(1)` of a split tensor `(N, C, ...)`.

    The result `(N, C, 1, ...)` is whole in space and counts once; it stays split in the batch.
    """

    def __init__(self, P_x: Partition) -> None:
        super().__init__()
        self.P_x = P_x

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x,)

    def _make_plan(self, tables: Sequence[Table]) -> int:
        return math.prod(tables[0].global_shape(self.P_x)[2:])

    def forward(self, input: Tensor) -> Tensor:
        """Return the mean over space."""
        if not self._takes_part:
            return self._outside(input)
        space = tuple(range(2, input.dim()))
        own = self._tied(input).sum(space, keepdim=True)
        return sum_to_replicated(own, comm=self.P_x.sub(space).comm) / self._plan

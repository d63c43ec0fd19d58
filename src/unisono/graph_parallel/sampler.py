"""`GraphBatchSampler`: batches with equal work on every dp rank, the same within a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch
from torch.utils.data import Sampler

from unisono.errors import PartitionError
from unisono.graph_parallel.groups import (
    GraphGroups,
    get_dp_rank,
    get_dp_world_size,
)


class GraphBatchSampler(Sampler[list[int]]):
    """Yields lists of sample numbers for a `DataLoader(batch_sampler=...)`.

    All ranks yield equally many lists; at each step those of the dp ranks cost about the same, and
    all ranks of a gp row get the same list. Every sample comes once an epoch; a few twice where
    single samples, which cannot be halved, do not fill the last step.

    Args:
        sizes: cost of each sample, e.g. its number of atoms or edges.
        batch_cost: largest cost of a batch; a sample above it makes a batch of its own.
        groups: the matrix of ranks; default the current one.
        shuffle: whether the order changes with the epoch.
        seed: of the shuffle; the same on all ranks.
    """

    def __init__(
        self,
        sizes: Sequence[float],
        batch_cost: float,
        *,
        groups: GraphGroups | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.costs = [float(size) for size in sizes]
        wrong = [cost for cost in self.costs if not 0 <= cost < math.inf]
        if not batch_cost > 0 or not self.costs or wrong:
            raise PartitionError.because(
                f"GraphBatchSampler(batch_cost={batch_cost})",
                f"{len(self.costs)} samples" + (f", one of cost {wrong[0]}" if wrong else ""),
                None,
                "a finite cost >= 0 per sample, and batch_cost > 0",
            )
        self.batch_cost = float(batch_cost)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._ranks = get_dp_world_size() if groups is None else groups.dp.size
        self._rank = get_dp_rank() if groups is None else groups.dp.rank

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently from now on; call it with the same number on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps():
            yield list(step[self._rank])

    def __len__(self) -> int:
        return len(self._steps())

    def _steps(self) -> list[list[list[int]]]:
        """Return for each step the batch of each dp rank; the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        count = len(self.costs)
        order = (
            torch.randperm(count, generator=generator).tolist()
            if self.shuffle
            else list(range(count))
        )
        batches = self._whole_steps(self._packed(order))
        batches.sort(key=self._cost)
        ranks = self._ranks
        steps = [batches[i : i + ranks] for i in range(0, len(batches), ranks)]
        if self.shuffle:
            steps = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
        return steps

    def _packed(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        filled = 0.0
        for sample in order:
            if not batches or filled + self.costs[sample] > self.batch_cost:
                batches.append([])
                filled = 0.0
            batches[-1].append(sample)
            filled += self.costs[sample]
        return batches

    def _whole_steps(self, batches: list[list[int]]) -> list[list[int]]:
        """Halve the costliest batches until every dp rank has one in each step."""
        while len(batches) % self._ranks:
            largest = max(
                (batch for batch in batches if len(batch) > 1), key=self._cost, default=None
            )
            if largest is None:
                missing = -len(batches) % self._ranks
                return batches + [list(batch) for batch in islice(cycle(batches), missing)]
            batches.remove(largest)
            middle = len(largest) // 2
            batches += [largest[:middle], largest[middle:]]
        return batches

    def _cost(self, batch: list[int]) -> float:
        return sum(self.costs[sample] for sample in batch)

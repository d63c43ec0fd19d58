"""`DistributedDataset` and `DistributedSampler`: rows in one random order over all ranks.

A shuffle moves rows between ranks by one all-to-all; afterwards each rank reads its own memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from unisono.data_parallel.arrays import home_of, local_rows
from unisono.data_parallel.reorder import reorder_rows
from unisono.data_parallel.rows import RankRows, Transforms
from unisono.data_parallel.seeding import agreed_seed
from unisono.errors import PartitionError
from unisono.expect import expect, expect_choice
from unisono.topology import decompose

__all__ = ["DistributedDataset", "DistributedSampler"]


class DistributedDataset(RankRows):
    """This rank's rows of an array, of any number on each rank. Collective over `comm`.

    Args:
        array: this rank's rows: tensor, numpy array, or an object with `.larray`. Never written to.
        transforms: a callable, or several applied in order, for each row.
        comm: the ranks; default the array's own, else the world.
    """

    def __init__(self, array: Any, transforms: Transforms = None, *, comm: object = None) -> None:
        rows = local_rows(array, "DistributedDataset")
        super().__init__(rows, transforms, home_of(array, comm))
        self.comm = self.communicator if comm is None else comm
        self.array = array
        self.cuts = decompose.bounds(self.communicator.block_lengths(rows))
        """Where each rank's rows begin in the whole; one more entry than ranks."""

    def __getstate__(self) -> dict[str, Any]:
        """A worker process needs the rows only."""
        return {**super().__getstate__(), "array": None}


class DistributedSampler(torch.utils.data.Sampler[int]):
    """Yields this rank's rows after bringing them into a random order over all ranks.

    With N rows in the whole array x and a seed, every rank makes the same
    `q = torch.randperm(N, generator=...)`, and holds `x[q]` in its place. The order depends on seed
    and epoch only, not on earlier shuffles. The constructor with `shuffle=True`, `set_seed` and
    `set_epoch` are collective over the dataset's communicator.

    Args:
        dataset: the `DistributedDataset` whose rows move.
        shuffle: shuffle now and in each epoch.
        seed: of the order; None: rank 0 draws one.
        shuffle_type: `"global"` over all ranks, `"local"` within each.
        correction: accepted for HeAT's sake; the order is always exact.
    """

    def __init__(
        self,
        dataset: DistributedDataset,
        shuffle: bool = False,
        seed: int | None = None,
        shuffle_type: str = "global",
        correction: bool = False,
    ) -> None:
        expect("dataset", dataset, DistributedDataset, "DistributedDataset(x)")
        expect("shuffle", shuffle, bool)
        expect("seed", seed, (int, type(None)))
        expect("correction", correction, bool)
        self.shuffle_type = expect_choice("shuffle_type", shuffle_type, ("global", "local"))
        self.dataset = dataset
        self.shuffle = shuffle
        self.correction = correction
        self.seed = seed
        self.epoch = 0
        self._order: Tensor | None = None
        """Row of the original array at each place; None before the first shuffle."""
        self._linked: list[DistributedSampler] = []
        if shuffle:
            self.seed = agreed_seed(seed, dataset.communicator)
            self._shuffle()

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of this rank's rows, in memory order."""
        return iter(range(len(self.dataset)))

    def __len__(self) -> int:
        """Number of rows on this rank."""
        return len(self.dataset)

    def set_seed(self, value: int) -> None:
        """Shuffle by another seed, and from now on in each epoch. Collective."""
        expect("seed", value, int)
        for sampler in self._all_linked():
            sampler.seed, sampler.shuffle, sampler.epoch = value, True, 0
            sampler._shuffle()

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by `seed + epoch`, unless shuffling is off. Collective."""
        expect("epoch", epoch, int)
        for sampler in self._all_linked():
            sampler.epoch = epoch
            if sampler.shuffle:
                sampler._shuffle()

    def set_shuffle_type(self, shuffle_type: str) -> None:
        """Choose `"global"` or `"local"` for the next shuffles. Local."""
        expect_choice("shuffle_type", shuffle_type, ("global", "local"))
        for sampler in self._all_linked():
            sampler.shuffle_type = shuffle_type

    def link(self, sampler: DistributedSampler) -> None:
        """Let another sampler follow this one: same seeds, same order, now and later. Collective.

        Its array needs as many rows on each rank, so that data and labels stay in step.
        """
        expect("sampler", sampler, DistributedSampler, "link(DistributedSampler(dataset))")
        if sampler.dataset.cuts != self.dataset.cuts:
            raise PartitionError.because(
                "link of two samplers",
                f"rows begin at {list(self.dataset.cuts)} here and at "
                f"{list(sampler.dataset.cuts)} there",
                hint="split both arrays alike",
            )
        if sampler is self or sampler in self._linked:
            return
        self._linked.append(sampler)
        sampler.seed, sampler.epoch, sampler.shuffle = self.seed, self.epoch, self.shuffle
        sampler.shuffle_type = self.shuffle_type
        sampler._reorder(self._order)

    def unlink(self, sampler: DistributedSampler | None = None) -> None:
        """Let one sampler, or all, no longer follow this one. Local."""
        self._linked = [s for s in self._linked if sampler is not None and s is not sampler]

    def _all_linked(self) -> list[DistributedSampler]:
        """Return this sampler and all that follow it, each once."""
        found: list[DistributedSampler] = [self]
        for sampler in found:
            found += [s for s in sampler._linked if s not in found]
        return found

    def _shuffle(self) -> None:
        cuts = self.dataset.cuts
        if self.shuffle_type == "global":
            self._reorder(self._permutation(cuts[-1]))
            return
        order = torch.arange(cuts[-1]) if self._order is None else self._order
        # From sorted rows, so that an epoch's order does not depend on the one before.
        held = [order[a:b].sort().values for a, b in pairwise(cuts)]
        self._reorder(torch.cat([part[self._permutation(len(part))] for part in held]))

    def _permutation(self, n: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed or 0) + self.epoch)
        return torch.randperm(n, generator=generator)

    def _reorder(self, order: Tensor | None) -> None:
        """Bring rows into `order` of the original array; None: as they were."""
        wanted = torch.arange(self.dataset.cuts[-1]) if order is None else order
        places = wanted
        if self._order is not None:
            now_at = torch.empty_like(wanted)
            now_at[self._order] = torch.arange(len(wanted))
            places = now_at[wanted]
        elif order is None:
            return
        self.dataset.data = reorder_rows(
            self.dataset.data, places, self.dataset.cuts, comm=self.dataset.communicator
        )
        self._order = order

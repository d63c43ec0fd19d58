"""`Draws`: random numbers of a layer's calls, apart from what else a rank draws.

Each call has a number, and numbers its own seed. What is computed again in a backward (activation
checkpointing) gets the number of the first time: torch has put its generator back to where it was
then, so the one number that each call takes from it tells which call that was.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from unisono.errors import UnisonoError
from unisono.nn.parameters import shared_generator
from unisono.topology import Partition

_KEPT = 4096
"""Calls that may still be computed again."""


class Draws:
    """Seeds of the calls of one layer.

    Args:
        partition: the ranks. Collective over them.
        place: ranks with the same number get the same seeds, others their own.
    """

    def __init__(self, partition: Partition, place: int = 0) -> None:
        comm = partition.comm if partition.active and partition.root.size > 1 else None
        with shared_generator(comm) as generator:
            self._seed = int(torch.randint(2**62, (), generator=generator)) + place
        self._calls = 0
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def next_call(self) -> int:
        """Return the number of this call; takes one number from this rank's default generator."""
        mark = int(torch.randint(2**62, ()))
        if torch._C._current_graph_task_id() != -1:
            if mark not in self._numbers:
                raise UnisonoError.because(
                    "a layer that may draw numbers, computed again in a backward",
                    "torch's generator is not where it was the first time: masks would differ",
                    None,
                    "checkpoint(..., preserve_rng_state=True)",
                )
            return self._numbers[mark]
        self._calls += 1
        self._numbers[mark] = self._calls
        if len(self._numbers) > _KEPT:
            self._numbers.popitem(last=False)
        return self._calls

    def generator(self, number: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a generator with the seed of a call."""
        seed = (self._seed + number * 0x9E3779B97F4A7C15) % 2**63
        return torch.Generator(device).manual_seed(seed)

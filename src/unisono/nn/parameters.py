"""Parameters of distributed layers: which block a rank holds, how it is drawn, how gradients meet.

Weights are drawn as the layer of the global size draws them, so one seed gives the same weights at
any number of ranks, and the same as the torch layer. `Holding` tells where a block lies in the
whole; checkpoints read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.expect import expect_choice
from unisono.topology.decompose import Interval

Weights = Literal["replicated", "root"]
_CHUNK = 1 << 22
"""Elements of a weight that are drawn at a time."""


@dataclass(frozen=True)
class Holding:
    """The block of a parameter or buffer that this rank holds, in the whole one."""

    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    """Sizes of the block; with a 0 where this rank holds nothing of it."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the block lies in the whole."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether the block is the whole parameter."""
        return self.shape == self.global_shape


def whole(shape: Sequence[int]) -> Holding:
    """Return the holding of a rank that has everything."""
    return part(shape, {})


def part(shape: Sequence[int], ranges: Mapping[int, Interval]) -> Holding:
    """Return the holding of a rank that has a range of some dims, and all of the others."""
    spans = [ranges.get(dim, (0, n)) for dim, n in enumerate(shape)]
    return Holding(tuple(shape), tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def nothing(shape: Sequence[int]) -> Holding:
    """Return the holding of a rank that has no part of a parameter of this shape."""
    return Holding(tuple(shape), (0,) * len(shape), (0,) * len(shape))


def check_weights(weights: str) -> Weights:
    """Return the way weights are held, or say which there are."""
    choices = get_args(Weights)
    return cast("Weights", expect_choice("weights", weights, choices, error=PartitionError))


@contextmanager
def shared_generator(comm: Communicator | None) -> Iterator[torch.Generator]:
    """Give all ranks of `comm` a generator in the state of its rank 0's default one. Collective.

    A rank whose default generator was in the same state is moved on with it; others are left alone,
    so ranks that were seeded alike stay alike, as in one process.
    """
    state = torch.get_rng_state()
    shared = state if comm is None else comm.with_device("cpu").broadcast(state, 0)
    generator = torch.Generator()
    generator.set_state(shared)
    yield generator
    if torch.equal(state, shared):
        torch.set_rng_state(generator.get_state())


def draw_uniform(
    holding: Holding,
    bound: float,
    generator: torch.Generator,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Tensor:
    """Return the own block of a tensor drawn uniformly from `[-bound, bound)`.

    All of it is drawn, in the order in which one process would, a few rows at a time.
    """
    rows, *rest = holding.global_shape
    width = max(1, math.prod(rest))
    step = max(1, _CHUNK // width)
    block = torch.empty(holding.shape, dtype=dtype)
    rows_here = holding.slices[0]
    for start in range(0, rows, step):
        chunk = torch.empty(min(step, rows - start), *rest, dtype=dtype)
        chunk.uniform_(-bound, bound, generator=generator)
        low, high = max(rows_here.start, start), min(rows_here.stop, start + chunk.shape[0])
        if low < high and block.numel():
            part = chunk[low - start : high - start][(slice(None), *holding.slices[1:])]
            block[low - rows_here.start : high - rows_here.start] = part
    return block.to(device) if device is not None else block

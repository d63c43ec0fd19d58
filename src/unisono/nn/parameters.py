"""Parameters of distributed layers: which block a rank holds, how it is drawn, how gradients meet.

Weights are drawn as the layer of the global size draws them, so one seed gives the same weights at
any number of ranks, and the same as the torch layer. `Holding` tells where a block lies in the
whole; checkpoints read it. States do not know the layout: whole tensors in and out, or blocks with
their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError, an
from unisono.expect import expect_choice
from unisono.topology.decompose import Interval

Weights = Literal["replicated", "root"]
StateMode = Literal["full", "sharded"]
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


# -- as states hold them --------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """A block of a parameter and its place in the whole one: what mode "sharded" saves."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


torch.serialization.add_safe_globals([Shard])  # torch.load takes files with nothing else by default


def join_blocks(block: Tensor, holding: Holding, comm: Communicator | None) -> Tensor:
    """Return the whole tensor on every rank of `comm`. Collective."""
    if comm is None or comm.size == 1:
        return block
    joined = block.new_empty(holding.global_shape)
    for holding_there, values in blocks_of_all(block, holding, comm):
        if values.numel():
            joined[holding_there.slices] = values.view(holding_there.shape)
    return joined


def blocks_of_all(
    block: Tensor, holding: Holding, comm: Communicator
) -> list[tuple[Holding, Tensor]]:
    """Return what each rank holds of a tensor, its values in one row. Collective."""
    dims = len(holding.global_shape)
    where = [
        Holding(holding.global_shape, record[:dims], record[dims:])
        for record in comm.all_gather_ints([*holding.start, *holding.shape])
    ]
    flat = comm.all_gather(block.detach().reshape(-1))
    return list(
        zip(
            where,
            flat.split([math.prod(block_at.shape) for block_at in where]),
            strict=True,
        )
    )


def own_block(value: Any, holding: Holding, key: str) -> Tensor:
    """Return the own block of what a state holds: a whole tensor, or the block and its place."""
    if isinstance(value, Shard):
        place = Holding(value.global_shape, value.offsets, tuple(value.tensor.shape))
        if place != holding:
            raise PartitionError.because(
                f"load_state_dict of {key}",
                f"a block of {list(place.shape)} at {list(place.start)}",
                f"this rank holds {list(holding.shape)} at {list(holding.start)}",
                "whole tensors (full_state_dict) for another number of ranks",
            )
        return value.tensor
    if not isinstance(value, Tensor):
        raise PartitionError.because(
            f"load_state_dict of {key}", an(type(value).__name__), None, "a tensor, or a Shard"
        )
    if tuple(value.shape) == holding.global_shape:
        return value[holding.slices]
    return value  # a bare block; torch compares its shape


@contextmanager
def state_dict_mode(mode: StateMode) -> Iterator[None]:
    """Choose what `state_dict()` of distributed layers gives inside the block.

    `"full"` (default): whole tensors on every rank; collective where blocks are split.
    `"sharded"`: own blocks with their place (`Shard`), which load at the same number of ranks.
    """
    expect_choice("state_dict_mode", mode, get_args(StateMode), error=PartitionError)
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def current_state_mode() -> StateMode:
    """Return what `state_dict()` of distributed layers gives at the moment."""
    return _mode


_mode: StateMode = "full"

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
from functools import cached_property
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.expect import expect_choice
from unisono.operators.partitioned import FanPlan, fan_plan, spread
from unisono.topology import Partition
from unisono.topology.decompose import Interval
from unisono.topology.fanout import Group, broadcast_groups, reduce_groups

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


def held_by(users: Partition | None, weights: Weights, used: Holding) -> Holding:
    """Return what this rank holds of the block that it uses as the others of `users` do.

    Args:
        users: the ranks that use the block, or None on a rank outside.
        weights: how it is held.
        used: the block.
    """
    if users is None or weights == "replicated" or users.rank == 0:
        return used
    return nothing(used.global_shape)


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


class WeightGrid:
    """The ranks that hold blocks of a weight: a grid of batch, outputs, inputs, then space.

    Channels or features lie along `dim` of input and output. The weight has `ins` parts along its
    inputs, by default those of the input; `note` says in an error why. `P_w` may leave out a batch
    that is not split. Refuses partitions that do not fit each other.
    """

    def __init__(
        self,
        name: str,
        P_x: Partition,
        P_y: Partition,
        P_w: Partition,
        dim: int,
        ins: int | None = None,
        note: str = "",
    ) -> None:
        P_x.check_same_root(P_y)
        P_x.check_same_root(P_w)
        shapes = f"P_x {list(P_x.shape)}, P_y {list(P_y.shape)}, P_w {list(P_w.shape)}"
        lead, space = P_x.shape[:dim], P_x.shape[dim + 1 :]
        others = *P_y.shape[:dim], *P_y.shape[dim + 1 :]
        if (*lead, *space) != others:
            raise PartitionError.because(
                name,
                shapes,
                f"{[*lead, *space]} != {list(others)} outside of dim {dim}",
                f"P_x and P_y may differ in dim {dim} only",
            )
        batch, outs = math.prod(lead), P_y.shape[dim]
        grid_shape = (batch, outs, P_x.shape[dim] if ins is None else ins, *space)
        fitting = [grid_shape, (*lead, *grid_shape[1:])]
        if batch == 1:
            fitting.insert(0, grid_shape[1:])
        if P_w.shape not in fitting:
            short = list(fitting[0])
            raise PartitionError.because(
                name, shapes, f"P_w must be {short}{note}", f"Partition({short})"
            )
        self.ranks = P_w.reshape(grid_shape)
        self.index: tuple[int, ...] | None = None
        """Own place; None outside of the grid."""
        if P_w.root.rank in P_w.ranks:
            self.index = self.ranks.index_of(P_w.ranks.index(P_w.root.rank))
        self._inputs = P_x.reshape((batch, 1, P_x.shape[dim], *space))
        self._outputs = P_y.reshape((batch, outs, 1, *space))

    @cached_property
    def users(self) -> Partition | None:
        """The ranks that use this rank's block; None outside of the grid."""
        if self.index is None:
            return None
        place = self.ranks.ranks.index(self.ranks.root.rank)
        return self.ranks.sub((0, *range(3, self.ranks.dim)), rank=place)

    def source(self, index: Sequence[int]) -> int:
        """Return a rank of the input with the batch and space of a place."""
        return self._inputs.ranks[self._inputs.rank_at((index[0], 0, 0, *index[3:]))]

    def to_weights(self, shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype) -> FanPlan:
        """Return how inputs, of these shapes by rank, come to the ranks that need them."""
        groups = broadcast_groups(self._inputs, self.ranks)
        return fan_plan(groups, self.ranks.root, [shapes[g.root] for g in groups], dtype)

    def to_outputs(
        self, partials: Mapping[int, tuple[int, ...]], dtype: torch.dtype, shape_in: Sequence[int]
    ) -> FanPlan:
        """Return how products, of these shapes by rank, are summed where the output lies.

        A rank outside of it gets nothing, for the batch of what it has given.
        """
        groups = reduce_groups(self.ranks, self._outputs)
        shapes = [partials[group.peers[0]] for group in groups]
        return fan_plan(groups, self.ranks.root, shapes, dtype, empty=(*shape_in[:1], 0))


def plan_from_first(
    users: Partition, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> FanPlan:
    """Return how tensors of these shapes go from the first rank of `users` to all of them."""
    count = sum(math.prod(shape) for shape in shapes)
    group = Group(users.ranks[0], users.ranks, users.ranks)
    return fan_plan([group], users.root, [(count,)], dtype)


def from_first(
    plan: FanPlan, shapes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the tensors of the first rank on all ranks of a plan, moved in one message.

    Gradients are summed on that rank.

    Args:
        plan: of `plan_from_first`, for these shapes.
        shapes: of the tensors on the first rank.
        tensors: own tensors; without elements on other ranks.
    """
    flat = torch.cat([x.reshape(-1) for x in tensors])
    parts = spread(flat, plan).split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

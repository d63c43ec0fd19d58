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
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import PartitionError
from unisono.expect import expect_choice
from unisono.operators import SumToReplicated
from unisono.operators.partitioned import fan_plan, spread
from unisono.operators.plans import GroupPlan
from unisono.topology import Partition
from unisono.topology.decompose import Interval
from unisono.topology.fanout import Group

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
    known = get_args(Weights)
    return cast("Weights", expect_choice("weights", weights, known, error=PartitionError))


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
    mine = torch.get_rng_state()
    shared = mine if comm is None else comm.with_device("cpu").broadcast(mine, 0)
    generator = torch.Generator()
    generator.set_state(shared)
    yield generator
    if torch.equal(mine, shared):
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
    own = holding.slices[0]
    for start in range(0, rows, step):
        chunk = torch.empty(min(step, rows - start), *rest, dtype=dtype)
        chunk.uniform_(-bound, bound, generator=generator)
        low, high = max(own.start, start), min(own.stop, start + chunk.shape[0])
        if low < high and block.numel():
            part = chunk[low - start : high - start][(slice(None), *holding.slices[1:])]
            block[low - own.start : high - own.start] = part
    return block.to(device) if device is not None else block


def draw_weight_and_bias(
    comm: Communicator | None,
    weight: Holding,
    bias: Holding | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return own blocks of weight and bias, drawn as torch's linear and conv layers draw theirs.

    Collective over `comm`. The fan is that of dim 1, for transposed convolutions too, as in torch.
    """
    fan = math.prod(weight.global_shape[1:])
    gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    bound = math.sqrt(3.0) * (gain / math.sqrt(fan)) if fan > 0 else 0.0
    with shared_generator(comm) as generator:
        w = draw_uniform(weight, bound, generator, dtype=dtype, device=device)
        b = None
        if bias is not None:
            edge = 1 / math.sqrt(fan) if fan > 0 else 0.0
            b = draw_uniform(bias, edge, generator, dtype=dtype, device=device)
    return nn.Parameter(w), None if b is None else nn.Parameter(b)


class _SumGradients(torch.autograd.Function):
    """The identity on parameters that several ranks hold; their gradients are summed together."""

    @staticmethod
    def forward(ctx: Any, plan: GroupPlan, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return tuple(map(Tensor.view_as, held, held))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [g for g in grads if g is not None]
        if not given:
            return None, *grads
        flat = torch.cat([g.reshape(-1) for g in given])
        total = SumToReplicated.apply_in_backward(flat, ctx.plan)
        parts = iter(total.split([g.numel() for g in given]))
        return None, *[None if g is None else next(parts).view(g.shape) for g in grads]


def summed_gradients(comm: Communicator, *held: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, which all ranks of `comm` hold equal; their gradients are summed.

    One message in the backward for all of them.
    """
    if comm.size > 1:
        for x in held:
            if x.requires_grad:
                return _SumGradients.apply(GroupPlan(comm), *held)
    return held


def from_first(
    users: Partition, shapes: Sequence[tuple[int, ...]], held: Sequence[Tensor]
) -> list[Tensor]:
    """Return the tensors of the first rank of `users` on all of them, moved in one message.

    Gradients are summed on that rank.

    Args:
        users: the ranks.
        shapes: of the tensors on the first rank.
        held: own tensors; without elements on other ranks.
    """
    count = sum(math.prod(shape) for shape in shapes)
    group = Group(users.ranks[0], users.ranks, users.ranks)
    plan = fan_plan([group], users.root, [(count,)], held[0].dtype)
    flat = torch.cat([x.reshape(-1) for x in held])
    parts = spread(flat, plan).split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

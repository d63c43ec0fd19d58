"""DistDL's `functional.halo_exchange`: ghosts of a padded tensor from the nearest neighbours.

One dim after the other, so that corners pass through two ranks. The layers of `unisono.nn` send
them straight from their owner instead, and from any number of ranks away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unisono.comm import Communicator
from unisono.operators.linear import LinearMap, identity

from ..compare import check_null_rank
from ..partition import MPIPartition, layout_of

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Side:
    """One neighbour in one dim."""

    rank: int
    """Of the communicator."""
    bulk: Slices
    """Own points that it sees as ghosts."""
    ghosts: Slices
    """Its points, as they are seen here."""


@dataclass(frozen=True)
class GhostPlan:
    """What one rank does: for each dim, its one or two neighbours."""

    comm: Communicator
    steps: tuple[tuple[Side, ...], ...]

    @property
    def adjoint(self) -> GhostPlan:
        """The same plan; the adjoint map reads it backwards."""
        return self


class FillGhosts(LinearMap):
    """Ghosts become the neighbours' points."""

    @staticmethod
    def kernel(x: Tensor, plan: GhostPlan) -> Tensor:
        """See `LinearMap`."""
        y = x.clone()
        for sides in plan.steps:
            sends = {side.rank: y[side.bulk] for side in sides}
            got = _exchanged(plan.comm, y, sends, {side.rank: y[side.ghosts] for side in sides})
            for side in sides:
                if side.rank in got:
                    y[side.ghosts] = got[side.rank]
        return y


class AddGhosts(LinearMap):
    """Ghosts go home and are added there; what they were is 0."""

    adjoint = FillGhosts

    @staticmethod
    def kernel(x: Tensor, plan: GhostPlan) -> Tensor:
        """See `LinearMap`."""
        y = x.clone()
        for sides in reversed(plan.steps):
            sends = {side.rank: y[side.ghosts].clone() for side in sides}
            for side in sides:
                y[side.ghosts] = 0
            got = _exchanged(plan.comm, y, sends, {side.rank: y[side.bulk] for side in sides})
            for side in sides:
                if side.rank in got:
                    y[side.bulk] += got[side.rank]
        return y


FillGhosts.adjoint = AddGhosts


class HaloExchangeFunction:
    """Ghosts of a tensor that is padded for them; gradients of ghosts are added to their points."""

    @staticmethod
    def apply(
        input: Tensor,
        P_x: MPIPartition,
        slices: Sequence[Sequence[Slices]],
        buffers: Any,  # noqa: ARG004
        neighbor_ranks: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Return a new tensor with its ghosts filled in. Collective over `P_x`.

        Args:
            input: own block with room for ghosts on all sides.
            P_x: partition of the input.
            slices: for each dim left bulk, left ghosts, right bulk, right ghosts.
            buffers: not needed.
            neighbor_ranks: from `P_x.neighbor_ranks(P_x.rank)`.
        """
        if not P_x.active:
            return identity(input)
        layout = layout_of(P_x)
        steps = ghost_steps(slices, neighbor_ranks, layout.ranks)
        return FillGhosts.apply(input, GhostPlan(layout.root, steps))


def ghost_steps(
    slices: Sequence[Sequence[Slices]],
    neighbor_ranks: Sequence[tuple[int | None, int | None]],
    ranks: Sequence[int],
) -> tuple[tuple[Side, ...], ...]:
    """Return the neighbours of each dim, with what goes to them and comes from them.

    Args:
        slices: for each dim left bulk, left ghosts, right bulk, right ghosts.
        neighbor_ranks: ranks of the partition; nobody at the ends.
        ranks: for each of them, its rank in the communicator.
    """
    return tuple(
        tuple(
            Side(ranks[neighbor], tuple(bulk), tuple(ghosts))
            for neighbor, bulk, ghosts in ((left, *boxes[:2]), (right, *boxes[2:]))
            if neighbor is not None and not check_null_rank(neighbor)
        )
        for boxes, (left, right) in zip(slices, neighbor_ranks, strict=True)
    )


def _exchanged(
    comm: Communicator, x: Tensor, sends: dict[int, Tensor], room: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Send what has elements, and return what comes for where there is room."""
    out = {rank: part for rank, part in sends.items() if part.numel()}
    into = {rank: (tuple(part.shape), x.dtype) for rank, part in room.items() if part.numel()}
    return comm.exchange(out, into) if out or into else {}

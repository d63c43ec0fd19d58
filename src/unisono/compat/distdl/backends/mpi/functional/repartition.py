"""DistDL's `functional.repartition`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unisono.operators import Repartition
from unisono.operators.linear import identity
from unisono.operators.repartition import RepartitionOnGroup
from unisono.topology.halo_plan import Box
from unisono.topology.overlap import LocalMove, Move, OverlapPlan

from ....utilities.torch import TensorStructure
from ..partition import MPIPartition, layout_of
from ..repartition import Overlap
from .teams import joining


class RepartitionFunction:
    """Own block of one layout -> own block of another; gradients take the way back."""

    @staticmethod
    def apply(
        input: Tensor,
        P_union: MPIPartition,
        x_global_structure: TensorStructure,
        x_local_structure: TensorStructure,
        y_local_structure: TensorStructure,
        P_x: MPIPartition,
        P_x_to_y_overlaps: Sequence[Overlap],
        P_x_to_y_buffers: Any,  # noqa: ARG004
        P_y: MPIPartition,
        P_y_to_x_overlaps: Sequence[Overlap],
        P_y_to_x_buffers: Any,  # noqa: ARG004
        preserve_batch: bool = True,
    ) -> Tensor:
        """Return the own block on `P_y`. Collective over `P_union`.

        Args:
            input: own block on `P_x`, or a tensor without elements.
            P_union: of both partitions; partners are ranks of it.
            x_global_structure: of the whole tensor.
            x_local_structure: of the own block on `P_x`.
            y_local_structure: of the own block on `P_y`.
            P_x: partition of the input.
            P_x_to_y_overlaps: for each rank of `P_y`, the box that goes there.
            P_x_to_y_buffers: not needed; likewise `P_y_to_x_buffers`.
            P_y: partition of the output.
            P_y_to_x_overlaps: for each rank of `P_x`, the box that comes from there.
            preserve_batch: a rank outside of `P_y` gets shape `(B, 0)`, otherwise `(0,)`.
        """
        if not P_union.active:
            return identity(input)
        union = layout_of(P_union)
        kept_from, sends = _moves(P_x_to_y_overlaps, union.ranks)
        kept_to, recvs = _moves(P_y_to_x_overlaps, union.ranks)
        before = tuple(int(n) for n in x_local_structure.shape) if P_x.active else None
        after = tuple(int(n) for n in y_local_structure.shape) if P_y.active else None
        plan = OverlapPlan(
            rank=union.root.rank,
            source_shape=before,
            dest_shape=after,
            sends=sends,
            recvs=recvs,
            local=None if kept_from is None or kept_to is None else LocalMove(kept_from, kept_to),
        )
        empty = (*input.shape[:1], 0) if preserve_batch else (0,)
        on_group = RepartitionOnGroup(union.root, plan, tuple(input.shape), after or empty)
        typed = input.to(x_global_structure.dtype)
        return Repartition.apply(joining(typed, x_global_structure), on_group)


def _moves(
    overlaps: Sequence[Overlap], ranks: tuple[int, ...]
) -> tuple[Box | None, tuple[Move, ...]]:
    """Return the box that stays here, and those that travel, by ascending rank of the root."""
    kept: Box | None = None
    moves: list[Move] = []
    for slices, _, partner in overlaps:
        if slices is None:
            continue
        box = tuple((int(s.start), int(s.stop)) for s in slices)
        if isinstance(partner, str):
            kept = box
        else:
            moves.append(Move(ranks[int(partner)], box))
    return kept, tuple(sorted(moves, key=lambda move: move.peer))

"""DistDL's movements of data as functions with their adjoints, called as `Function.apply(...)`.

Derivatives of any order work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from unisono.compat.distdl.layers import Interpolate, Ints
from unisono.compat.distdl.partitions import MPIPartition, layout_of
from unisono.compat.distdl.structures import (
    Overlap,
    TensorStructure,
    broadcast_tensor_structure,
)
from unisono.operators import RepartitionMap, all_sum_reduce, attach
from unisono.operators.linear import identity
from unisono.operators.partitioned import collect, fan_plan, spread
from unisono.operators.repartition import RepartitionOnGroup
from unisono.topology.fanout import Group
from unisono.topology.halo import Box
from unisono.topology.overlap import LocalMove, Move, OverlapPlan


def joining(x: Tensor, structure: TensorStructure) -> Tensor:
    """Return `x` as part of the graph where the structure says that gradients are wanted.

    Then this rank's backward joins those of the others.
    """
    if not structure.requires_grad or x.requires_grad or not torch.is_grad_enabled():
        return x
    return attach(x, torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True))


class BroadcastFunction:
    """The block of a team's first rank on all others; gradients are summed there."""

    _sums: ClassVar[bool] = False

    @classmethod
    def apply(
        cls,
        input: Tensor,
        P_send: MPIPartition,
        P_recv: MPIPartition,
        preserve_batch: bool = True,
        input_tensor_structure: TensorStructure | None = None,
        output_tensor_structure: TensorStructure | None = None,
    ) -> Tensor:
        """Return what this rank gets. Collective over both teams.

        Args:
            input: own block, or a tensor without elements.
            P_send: from `create_broadcast_partition_to`, or `create_reduction_partition_to` for a
                sum; likewise `P_recv`.
            preserve_batch: a rank that gets nothing has shape `(B, 0)`, otherwise `(0,)`.
            input_tensor_structure: of the own block; default that of `input`.
            output_tensor_structure: of what comes; default: the ranks tell each other.
        """
        if not P_send.active and not P_recv.active:
            return identity(input)
        sent = input_tensor_structure or TensorStructure(input)
        got = output_tensor_structure or broadcast_tensor_structure(sent, P_send, P_recv)
        structure = got if P_recv.active else sent
        # A tensor without elements, as ranks that send nothing have it, may be of any dtype.
        dtype = (sent if P_send.active else got).dtype or input.dtype
        ends = [(P_send, tuple(sent.shape)), (P_recv, tuple(structure.shape))]
        if P_send == P_recv:
            del ends[1]
        groups: list[Group] = []
        blocks: list[tuple[int, ...]] = []
        for team, shape in ends:
            if team.active:
                members = layout_of(team).ranks
                # the first rank of a team stays out of it where it gets a block in another one
                stays_out = len(ends) == 2 and team is (P_recv if cls._sums else P_send)
                groups.append(Group(members[0], members, members[1:] if stays_out else members))
                blocks.append(shape)
        root = layout_of(P_send if P_send.active else P_recv).root
        empty = (*input.shape[:1], 0) if preserve_batch else (0,)
        plan = fan_plan(groups, root, blocks, dtype, empty=empty)
        return (collect if cls._sums else spread)(joining(input, structure), plan)


class SumReduceFunction(BroadcastFunction):
    """The sum of a team's blocks on its first rank; gradients are broadcast."""

    _sums = True


class AllSumReduceFunction:
    """The sum of a team's blocks on all of them; gradients likewise."""

    @staticmethod
    def apply(
        input: Tensor,
        P_allreduce: MPIPartition,
        input_tensor_structure: TensorStructure | None = None,  # noqa: ARG004
        output_tensor_structure: TensorStructure | None = None,  # noqa: ARG004
    ) -> Tensor:
        """Return the sum. Collective over the team; an inactive rank gets its input.

        Args:
            input: own block, equal in shape on all ranks.
            P_allreduce: from `create_allreduction_partition`.
            input_tensor_structure: not needed; likewise `output_tensor_structure`.
        """
        if not P_allreduce.active:
            return identity(input)
        return all_sum_reduce(input, comm=P_allreduce._members)


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
        return RepartitionMap.apply(joining(typed, x_global_structure), on_group)


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


class ZeroVolumeCorrectorFunction:
    """A tensor without elements becomes the number 0; any other is copied.

    >>> ZeroVolumeCorrectorFunction.apply(torch.empty(3, 0))
    tensor(0.)
    """

    @staticmethod
    def apply(input: Tensor) -> Tensor:
        """Return a copy, or 0, whose gradient comes back without elements."""
        return input.clone() if input.numel() else input.sum(dtype=input.dtype)


class InterpolateFunction:
    """Own outputs of an upsampling from own inputs, without communication."""

    @staticmethod
    def apply(
        input: Tensor, scale_factor: float | None, mode: str, align_corners: bool, *boxes: Ints
    ) -> Tensor:
        """Return the own outputs.

        Args:
            input: own inputs; points of other ranks are left out.
            scale_factor: if it was given; None for the ratio of the sizes.
            mode: "nearest", "linear" or "cubic".
            align_corners: as in torch.
            boxes: start, stop and whole shape of the input, then of the output, for each dim.
        """
        arguments: Any = (*boxes, scale_factor, mode, align_corners)
        return Interpolate(*arguments)(input)

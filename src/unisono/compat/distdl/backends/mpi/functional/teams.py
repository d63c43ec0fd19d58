"""What broadcast and sum-reduce share: two teams of this rank as the plan of one movement."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.operators import attach
from unisono.operators.partitioned import FanPlan, fan_plan
from unisono.topology.fanout import Group

from ....utilities.torch import TensorStructure
from ..partition import MPIPartition, layout_of


def plan_of_teams(
    x: Tensor,
    rooted: MPIPartition,
    peered: MPIPartition,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    preserve_batch: bool,
) -> FanPlan:
    """Return the plan of a rank that is the first of one team and any of another.

    Args:
        x: own input.
        rooted: the team whose first rank this is, or inactive.
        peered: the team in which it is one of the others, or `rooted` again, or inactive.
        shapes: of the blocks in the two.
        dtype: of the data.
        preserve_batch: keep the batch size where the result has no elements.
    """
    groups: list[Group] = []
    blocks: list[tuple[int, ...]] = []
    if rooted.active:
        members = layout_of(rooted).ranks
        peers = members if rooted == peered else members[1:]
        groups.append(Group(members[0], members, peers))
        blocks.append(shapes[0])
    if peered.active and rooted != peered:
        members = layout_of(peered).ranks
        groups.append(Group(members[0], members, members))
        blocks.append(shapes[1])
    root = layout_of(rooted if rooted.active else peered).root
    empty = (*x.shape[:1], 0) if preserve_batch else (0,)
    return fan_plan(groups, root, blocks, dtype, empty=empty)


def joining(x: Tensor, structure: TensorStructure) -> Tensor:
    """Return `x` as part of the graph where the structure says that gradients are wanted.

    Then this rank's backward joins those of the others.
    """
    if not structure.requires_grad or x.requires_grad or not torch.is_grad_enabled():
        return x
    return attach(x, torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True))

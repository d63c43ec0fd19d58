"""DistDL's `functional.broadcast`."""

from __future__ import annotations

from torch import Tensor

from unisono.operators.linear import identity
from unisono.operators.partitioned import spread

from ....utilities.torch import TensorStructure
from ..partition import MPIPartition
from ..tensor_comm import broadcast_tensor_structure
from .teams import joining, plan_of_teams


class BroadcastFunction:
    """The block of a team's first rank on all others; gradients are summed there."""

    @staticmethod
    def apply(
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
            P_send: from `create_broadcast_partition_to`; likewise `P_recv`.
            preserve_batch: a rank that gets nothing has shape `(B, 0)`, otherwise `(0,)`.
            input_tensor_structure: of the own block; default that of `input`.
            output_tensor_structure: of what comes; default: the ranks tell each other.
        """
        if not P_send.active and not P_recv.active:
            return identity(input)
        given = input_tensor_structure or TensorStructure(input)
        got = output_tensor_structure or broadcast_tensor_structure(given, P_send, P_recv)
        known = got if P_recv.active else given
        shapes = tuple(given.shape), tuple(known.shape)
        dtype = known.dtype or input.dtype
        plan = plan_of_teams(input, P_send, P_recv, shapes, dtype, preserve_batch)
        return spread(joining(input, known), plan)

"""DistDL's `functional.sum_reduce`."""

from __future__ import annotations

from torch import Tensor

from unisono.operators.linear import identity
from unisono.operators.partitioned import collect

from ....utilities.torch import TensorStructure
from ..partition import MPIPartition
from ..tensor_comm import broadcast_tensor_structure
from .teams import joining, plan_of_teams


class SumReduceFunction:
    """The sum of a team's blocks on its first rank; gradients are broadcast."""

    @staticmethod
    def apply(
        input: Tensor,
        P_send: MPIPartition,
        P_recv: MPIPartition,
        preserve_batch: bool = True,
        input_tensor_structure: TensorStructure | None = None,
        output_tensor_structure: TensorStructure | None = None,
    ) -> Tensor:
        """Return the sum this rank gets. Collective over both teams.

        Args:
            input: own block, or a tensor without elements.
            P_send: from `create_reduction_partition_to`; likewise `P_recv`.
            preserve_batch: a rank that gets nothing has shape `(B, 0)`, otherwise `(0,)`.
            input_tensor_structure: of the own block; default that of `input`.
            output_tensor_structure: of the sum; default: the ranks tell each other.
        """
        if not P_send.active and not P_recv.active:
            return identity(input)
        given = input_tensor_structure or TensorStructure(input)
        got = output_tensor_structure or broadcast_tensor_structure(given, P_send, P_recv)
        known = given if P_send.active else got
        shapes = tuple((got if P_recv.active else given).shape), tuple(given.shape)
        dtype = known.dtype or input.dtype
        plan = plan_of_teams(input, P_recv, P_send, shapes, dtype, preserve_batch)
        return collect(joining(input, got if P_recv.active else given), plan)

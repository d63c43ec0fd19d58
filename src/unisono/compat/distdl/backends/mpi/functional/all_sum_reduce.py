"""DistDL's `functional.all_sum_reduce`."""

from __future__ import annotations

from torch import Tensor

from unisono.operators import all_sum_reduce
from unisono.operators.linear import identity

from ....utilities.torch import TensorStructure
from ..partition import MPIPartition


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

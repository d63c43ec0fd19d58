"""DistDL's `backends.mpi.tensor_comm`: what a split tensor looks like as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm.headers import pack_shape, unpack_shape

from ...utilities.torch import TensorStructure
from .partition import MPIPartition
from .tensor_decomposition import compute_subtensor_shapes_unbalanced


def assemble_global_tensor_structure(
    local: Tensor | TensorStructure, P_in: MPIPartition, P_out: MPIPartition | None = None
) -> TensorStructure:
    """Return the structure of the whole tensor, on `P_in` and on `P_out`; an empty one elsewhere.

    Collective over both. Sizes are summed along each axis; dtype and `requires_grad` are own
    ones on `P_in`, those of its first rank on `P_out`.

    Args:
        local: own block, or its structure.
        P_in: partition of the blocks.
        P_out: who else is to know; it holds the first rank of `P_in`.
    """
    whole = TensorStructure()
    shapes = compute_subtensor_shapes_unbalanced(local, P_in)
    if shapes is not None and P_in.index is not None:
        lines = [
            tuple(slice(None) if other == dim else int(i) for other, i in enumerate(P_in.index))
            for dim in range(P_in.dim)
        ]
        whole.shape = torch.Size(int(shapes[(*line, dim)].sum()) for dim, line in enumerate(lines))
        whole.dtype = local.dtype
        whole.requires_grad = local.requires_grad
    if P_out is None or not P_out.active:
        return whole
    packed = P_out.broadcast_data(_packed(whole) if P_in.active else None, P_data=P_in)
    return whole if packed is None else _unpacked(packed.tolist())


def broadcast_tensor_structure(
    in_structure: TensorStructure, P_send: MPIPartition, P_recv: MPIPartition
) -> TensorStructure:
    """Return the structure of what this rank gets in `P_recv`; an empty one if it gets nothing.

    Collective over both teams, as `create_broadcast_partition_to` and
    `create_reduction_partition_to` make them.

    Args:
        in_structure: of what this rank brings; looked at where `P_send` is active.
        P_send: where it brings it.
        P_recv: where it gets something.
    """
    found = TensorStructure()
    teams = [P_send] if P_send == P_recv else [P for P in (P_send, P_recv) if P.active]
    for team in sorted(teams, key=lambda P: sorted(P._group or ())):
        mine = _packed(in_structure) if team is P_send else None
        known = next(one for one in team._members.all_gather_object(mine) if one is not None)
        if team == P_recv:
            found = _unpacked(known)
    return found


def _packed(structure: TensorStructure) -> list[int]:
    dtype = structure.dtype or torch.get_default_dtype()
    return [int(bool(structure.requires_grad)), *pack_shape(tuple(structure.shape), dtype)]


def _unpacked(record: Sequence[int]) -> TensorStructure:
    made = TensorStructure()
    shape, made.dtype = unpack_shape(record[1:])
    made.shape = torch.Size(shape)
    made.requires_grad = bool(record[0])
    return made

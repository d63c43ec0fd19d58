"""The `nn.embedding` of DistDL's forks."""

from __future__ import annotations

from typing import Any

import torch

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module
from .stored import refuse_unknown

__all__ = ["DistributedEmbedding"]


class DistributedEmbedding(ours.DistributedEmbedding, Module):
    """`torch.nn.Embedding` with its table split over the last axis of a partition.

    `collect_state` has no effect: `state_dict()` always gives whole tensors.
    """

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        split: str = "dim",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        collect_state: bool = False,  # noqa: ARG002
        **unknown: Any,
    ) -> None:
        refuse_unknown(self, unknown)
        super().__init__(
            layout_of(P_x), num_embeddings, embedding_dim, padding_idx, max_norm, norm_type,
            scale_grad_by_freq, sparse, split, device=device, dtype=dtype,
        )  # fmt: skip

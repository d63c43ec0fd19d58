"""Embedding tables split over ranks: by columns, or by rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.comm import Communicator
from unisono.errors import PartitionError, UnisonoError
from unisono.expect import expect_choice, expect_int
from unisono.nn.agreement import Table
from unisono.nn.parameters import (
    Weights,
    check_weights,
    nothing,
    part,
    shared_generator,
)
from unisono.nn.planned import PlannedModule, ScaledGradient, zero_volume
from unisono.operators import sum_to_replicated
from unisono.topology import Partition
from unisono.topology.decompose import block


class DistributedEmbedding(PlannedModule):
    """`torch.nn.Embedding` with its table split over the last axis of a partition.

    The leading axes of `P_x` split the ids, which all ranks of the last axis hold alike. With
    `split="dim"` a rank holds columns and gets its columns of the result, without a message. With
    `split="vocab"` it holds rows; the results are summed, and every rank of the last axis gets the
    whole vectors as a value that counts once.

    Args:
        P_x: partition of the result: the dims of the ids, then one for the table.
        num_embeddings: rows of the whole table.
        embedding_dim: columns of the whole table.
        padding_idx: row that stays as it is.
        max_norm: rows that are looked up are scaled down to this norm.
        norm_type: of that norm.
        scale_grad_by_freq: divide gradients by how often an id occurs in the whole batch.
        sparse: sparse gradients; only where no other rank holds the same part of the table.
        split: "dim" or "vocab".
        weights: "replicated", or "root": of the ranks that split the ids, the first alone holds
            their part of the table and sends it to the others in each forward.
    """

    weight: nn.Parameter

    def __init__(
        self,
        P_x: Partition,
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
        weights: Weights = "replicated",
    ) -> None:
        super().__init__()
        expect_choice("split", split, ("dim", "vocab"), error=PartitionError)
        if padding_idx is not None:
            expect_int(
                "padding_idx", padding_idx, -num_embeddings, num_embeddings, error=PartitionError
            )
        if not norm_type > 0:
            raise PartitionError.because(
                f"DistributedEmbedding(norm_type={norm_type})", None, f"not {norm_type} > 0", "2.0"
            )
        self.P_x = P_x
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.split = split
        self.weights: Weights = check_weights(weights)
        replicas = P_x.size // P_x.shape[-1]
        if sparse and replicas > 1:
            raise PartitionError.because(
                "DistributedEmbedding(sparse=True)",
                f"{P_x!r}: {replicas} ranks use the same part of the table",
                "sparse gradients are not summed over ranks",
                "sparse=False",
            )
        shape = (num_embeddings, embedding_dim)
        holding = nothing(shape)
        if P_x.active and P_x.index is not None:
            dim = 1 if split == "dim" else 0
            holding = part(shape, {dim: block(shape[dim], P_x.shape[-1], P_x.index[-1])})
        self._block = holding
        holding = self._hold("weight", holding)
        with shared_generator(self._control()) as generator:
            table = torch.empty(shape, dtype=dtype).normal_(generator=generator)
        if self.padding_idx is not None:
            table[self.padding_idx] = 0
        rows = table[holding.slices].clone()
        self.weight = nn.Parameter(rows if device is None else rows.to(device))

    def _read(self, input: tuple[Any, ...]) -> Any:
        structures, gradients, problem = super()._read(input)
        if problem is None and self.P_x.active:
            problem = self._problem_of(input[0])
        return structures, gradients, problem

    def _problem_of(self, ids: Tensor) -> UnisonoError | None:
        if ids.dtype not in (torch.int32, torch.int64):
            return PartitionError.because(
                "DistributedEmbedding", f"ids of dtype {ids.dtype}", None, "ids.long()"
            )
        if ids.device.type != "cpu" or not ids.numel():
            return None  # another device reports it; a look would stop the host
        low, high = (int(end) for end in ids.aminmax())
        if low >= 0 and high < self.num_embeddings:
            return None
        return PartitionError.because(
            f"DistributedEmbedding(num_embeddings={self.num_embeddings})",
            f"ids from {low} to {high}",
            f"not 0 <= {low if low < 0 else high} < {self.num_embeddings}",
            f"ids from 0 to {self.num_embeddings - 1}",
        )

    def _make_plan(self, tables: Sequence[Table]) -> None:
        (table,) = tables
        for place in range(self.P_x.size):
            sharing = self.P_x.sub(self.P_x.dim - 1, rank=place).ranks
            shapes = {rank: table.of(rank).shape for rank in sharing}
            if len(set(shapes.values())) > 1 or len(shapes[sharing[0]]) != self.P_x.dim - 1:
                raise PartitionError.because(
                    f"DistributedEmbedding on {self.P_x!r}",
                    "\n".join(f"rank {rank}: ids {list(s)}" for rank, s in shapes.items()),
                    f"ids have {self.P_x.dim - 1} dims, alike on all ranks of the last axis",
                    "give every rank of the last axis the same ids",
                )

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        axes = tuple(range(self.P_x.dim - 1))
        return self.P_x.sub(axes) if self.P_x.active else None

    @property
    def _sharing(self) -> Communicator:
        """The ranks of the last axis, which look up the same ids."""
        return self.P_x.sub(self.P_x.dim - 1).comm

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the ids: own columns, or whole ones with `split="vocab"`."""
        if not self._takes_part:
            shape = zero_volume(input) if input.numel() else input.shape
            return self._outside(self.weight.reshape(-1)[:0].reshape(shape))
        if self.max_norm is not None:
            self._renormalise(input, self.max_norm)
        (weight,) = self._used("weight")
        start = self._block.start[0]
        local = input - start
        here = (local >= 0) & (local < weight.shape[0])
        if self.split == "vocab":
            elsewhere = (input >= 0) & (input < self.num_embeddings) & ~here
            local = local.masked_fill(elsewhere, 0)
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        if weight.shape[0] == 0:
            y = weight.sum().expand(*input.shape, self.embedding_dim)
        else:
            y = F.embedding(local, weight, padding, sparse=self.sparse)
        if self.scale_grad_by_freq:
            y = ScaledGradient.apply(y, 1.0 / self._frequencies(input)[input].to(y).unsqueeze(-1))
        if self.split == "dim":
            return y
        y = torch.where(here.unsqueeze(-1), y, torch.zeros_like(y))
        return sum_to_replicated(y, comm=self._sharing)

    def _frequencies(self, ids: Tensor) -> Tensor:
        """Return how often each id occurs in the whole batch."""
        counts = torch.bincount(ids.reshape(-1), minlength=self.num_embeddings)
        samples = self._users("weight")
        return counts if samples is None or samples.size == 1 else samples.comm.all_reduce(counts)

    @torch.no_grad()
    def _renormalise(self, ids: Tensor, max_norm: float) -> None:
        """Scale down the rows that some rank looks up; the same rows on all that hold them."""
        used = (self._frequencies(ids) > 0).nonzero().squeeze(1)
        samples = self._users("weight")
        if self.weights == "root" and samples is not None and samples.rank != 0:
            return
        rows = self._block.slices[0]
        local = used[(used >= rows.start) & (used < rows.stop)] - rows.start
        rows = self.weight[local]
        norms = self._norms(rows)
        factor = torch.where(norms > max_norm, max_norm / (norms + 1e-7), torch.ones_like(norms))
        self.weight[local] = rows * factor.unsqueeze(1)

    def _norms(self, rows: Tensor) -> Tensor:
        """Return the norms of whole rows, of which this rank may hold columns. Collective then."""
        # With a column of zeros: this rank may hold none.
        norms = torch.linalg.vector_norm(F.pad(rows, (0, 1)), self.norm_type, 1)
        if self.split == "vocab":
            return norms
        parts = self._sharing.all_gather(norms[None], 0, [1] * self._sharing.size)
        return torch.linalg.vector_norm(parts, self.norm_type, 0)

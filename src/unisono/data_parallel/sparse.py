"""Sparse gradients: rows of all ranks are gathered instead of summed in a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.data_parallel.construction import on_device


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return ids of the parameters whose gradients will be sparse."""
    return {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }


class SparseParameters:
    """The parameters with sparse gradients, and how these become means over ranks."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.used = [False] * len(self.params)
        """Whether each got a gradient since the last reduction."""

    @torch.no_grad()
    def average(self, comm: Communicator, weight: float) -> int:
        """Replace each gradient by the weighted sum over ranks; returns bytes. Collective."""
        sent = 0
        for i, param in enumerate(self.params):
            mine = _rows_of(param)
            counts = comm.all_gather_ints([int(self.used[i]), mine._nnz()])
            self.used[i] = False
            if not any(used for used, _ in counts):
                continue
            sizes = [count for _, count in counts]
            here = on_device(comm, param.device)
            values = mine.values() * weight
            param.grad = torch.sparse_coo_tensor(
                here.all_gather(mine.indices(), dim=1, sizes=sizes),
                here.all_gather(values, sizes=sizes),
                param.shape,
                check_invariants=False,
            ).coalesce()
            sent += values.numel() * values.element_size() + 8 * mine._nnz()
        return sent


def _rows_of(param: nn.Parameter) -> Tensor:
    """Return the gradient with one index a row; without any row if there is none."""
    grad = param.grad
    if grad is None:
        grad = torch.zeros_like(param)
    if not grad.is_sparse:
        grad = grad.to_sparse(1)
    return grad.coalesce()

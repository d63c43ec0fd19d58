"""Sums of sparse tensors over ranks, as `DistributedDataParallel` asks for them of embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm.engines.base import Blocks, Engine
from unisono.comm.reductions import check_op
from unisono.errors import CollectiveMismatch, UnisonoError


def check(xs: Blocks, op: str) -> None:
    """Refuse what has no meaning for elements that are not there."""
    for x in xs:
        if x.layout is not torch.sparse_coo or op not in ("sum", "mean"):
            raise UnisonoError.because(
                f"all_reduce({op}) of {[str(x.layout).removeprefix('torch.') for x in xs]} tensors",
                "of sparse tensors there are sums and means, of all of them or of none",
                None,
                "x.to_dense() first",
            )
        check_op(op, x.dtype)


def all_reduce_(x: Tensor, op: str, engine: Engine, timeout_s: float) -> None:
    """Replace `x` on every rank by the sum, coalesced; the same bits on all ranks. Blocking."""
    part = x.detach().coalesce()
    indices, values = part.indices().contiguous(), part.values().contiguous()
    shapes = engine.all_gather_ints((values.shape[0], len(indices), *x.shape), timeout_s=timeout_s)
    if len({shape[1:] for shape in shapes}) > 1:
        raise CollectiveMismatch.because(
            "all_reduce of sparse tensors",
            f"elements, sparse dims and shape on each rank: {shapes}",
        )
    counts = [count for count, *_ in shapes]
    every_index = [indices.new_empty(len(indices), count) for count in counts]
    every_value = [values.new_empty(count, *values.shape[1:]) for count in counts]
    for outs, block in ((every_index, indices), (every_value, values)):
        ticket = engine.all_gather(outs, block, async_op=False, timeout_s=timeout_s)
        if ticket is not None:
            ticket.wait(timeout_s)
    total = torch.sparse_coo_tensor(
        torch.cat(every_index, 1), torch.cat(every_value), x.shape, check_invariants=False
    ).coalesce()
    x.copy_(total / engine.size if op == "mean" else total)  # of another length: not detached

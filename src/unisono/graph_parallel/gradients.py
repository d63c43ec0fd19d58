"""`sync_gradients`: parameter gradients over the dp x gp matrix of ranks.

Parameters of the partitioned part of a model hold one term on each rank of a row: sum over gp.
Parameters used after the last reduce or gather hold the whole: mean over gp. Both: mean over dp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unisono.comm import Communicator, checking
from unisono.errors import LayoutError, MeshError, PartitionError, an
from unisono.graph_parallel.equality import difference_over_ranks
from unisono.graph_parallel.groups import current_groups
from unisono.graph_parallel.matrix import GraphGroups, graph_groups


def sync_gradients(
    parameters: nn.Module | Iterable[Tensor],
    *,
    replicated: nn.Module | Iterable[Tensor] = (),
    groups: GraphGroups | None = None,
    bucket_mb: float = 25.0,
) -> None:
    """Replace each `.grad` by that of the whole batch. Collective over the matrix of ranks.

    A rank without a gradient counts as zero; a parameter without one anywhere keeps None.

    Args:
        parameters: all parameters of the model (or the model), in the same order on every rank.
        replicated: those of them that are used only after the last `reduce(grad="identity")` or
            `gather(grad="slice")`. Check mode compares them over the row.
        groups: the matrix; default the current one.
        bucket_mb: gradients travel joined in buckets of this size.
    """
    _check_bucket(bucket_mb)
    groups = _matrix(groups)
    whole = {id(p) for p in _listed(replicated)}
    wanted = [p for p in _listed(parameters) if p.requires_grad]
    with torch.no_grad():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in wanted]
        is_whole = [id(p) in whole for p in wanted]
        if checking.active and groups.gp.size > 1:
            _compare([g for g, r in zip(grads, is_whole, strict=True) if r], groups.gp)
        present = torch.tensor([p.grad is not None for p in wanted], device=groups.gp.device)
        present = present.to(torch.float32)
        for comm in (groups.gp, groups.dp):
            if comm.size > 1:
                with comm.coalesce(bucket_mb):
                    for tensor in (*grads, present):
                        comm.all_reduce_(tensor)
        seen = present.tolist()
        for p, grad, replicate, count in zip(wanted, grads, is_whole, seen, strict=True):
            if count:
                p.grad = grad.div_(groups.dp.size * (groups.gp.size if replicate else 1))


def _check_bucket(bucket_mb: object) -> None:
    size = bucket_mb if isinstance(bucket_mb, int | float) else math.nan
    if isinstance(bucket_mb, bool) or not 0 <= size < math.inf:
        raise PartitionError.because(
            f"sync_gradients(bucket_mb={bucket_mb!r})",
            "no size of a bucket",
            f"not 0 <= {bucket_mb} < inf",
            "bucket_mb=25; 0 sends each gradient by itself",
        )


def _matrix(groups: GraphGroups | None) -> GraphGroups:
    found = current_groups() if groups is None else groups
    if found is not None:
        return found
    alone = graph_groups(1)
    if alone.dp.size > 1:
        raise MeshError.because(
            "sync_gradients before set-up",
            f"a world of {alone.dp.size} ranks and no graph-parallel groups",
            None,
            'setup_gp({"gp_gpus": 2}), or groups=graph_groups(2)',
        )
    return alone


def _listed(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    given: Iterable[object]
    if isinstance(parameters, nn.Module):
        given = parameters.parameters()
    else:  # a tensor by itself would be taken apart into its rows
        several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
        given = parameters if several else (parameters,)
    listed: dict[int, Tensor] = {}
    for p in given:
        if not isinstance(p, Tensor):
            raise PartitionError.because(
                "sync_gradients of a model or its parameters",
                f"{an(type(p).__name__)}: {p!r:.60}",
                None,
                "sync_gradients(model), or sync_gradients(model.parameters())",
            )
        listed[id(p)] = p
    return list(listed.values())


def _compare(grads: list[Tensor], comm: Communicator) -> None:
    """Raise on all ranks unless gradients of replicated parameters are equal over the row."""
    for number, grad in enumerate(grads):
        found = difference_over_ranks(grad, comm)
        if found is not None:
            raise LayoutError.because(
                "sync_gradients(replicated=...)",
                f"gradient {number} of them, shape {list(grad.shape)}: {found}",
                None,
                "leave it out of replicated, or wrap its use in the partitioned part in copy(w)",
            )

"""Gradients of a split network, clipped by the norm of the whole.

The norm counts each element once wherever it is held, so all ranks scale by the same factor and
replicas stay replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import PartitionError, UnisonoError
from unisono.nn.parameters import Holding
from unisono.nn.planned import PlannedModule, living_layers

__all__ = ["clip_grad_norm_"]


class NonFiniteNorm(UnisonoError):
    """A gradient with values that are infinite or not numbers; a `RuntimeError`, as torch's."""


def clip_grad_norm_(
    module_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients down, in place, to a norm of at most `max_norm`; return the norm before.

    Collective over the ranks of the network where some parameter is split. Every rank gets the
    norm that `torch.nn.utils.clip_grad_norm_` gives for the undivided network. Parameters of
    ordinary layers count as held by all ranks.

    Args:
        module_or_parameters: the network, or parameters of it: the same ones, in the same order,
            on all ranks. Where ranks have different parameters: the network.
        max_norm: the largest norm that is left alone.
        norm_type: p of the p-norm; `math.inf` for the largest magnitude.
        error_if_nonfinite: raise, on all ranks, where the norm is infinite or not a number.
    """
    parameters = _listed(module_or_parameters)
    if math.isnan(max_norm) or max_norm < 0:
        raise PartitionError.because(
            f"clip_grad_norm_(max_norm={max_norm})", None, f"not {max_norm} >= 0", "max_norm=1.0"
        )
    total = _total_norm(parameters, float(norm_type))
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise NonFiniteNorm.because(
            "clip_grad_norm_(error_if_nonfinite=True)",
            f"a gradient of norm {total.item()}",
            None,
            "error_if_nonfinite=False, or leave this step out",
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _listed(source: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters, each once; of a network also those that only other ranks store."""
    if isinstance(source, Tensor):
        return [source]
    if isinstance(source, nn.Module):
        source = [p for layer in source.modules() for p in _parameters_of(layer)]
    return list({id(p): p for p in source}.values())


def _parameters_of(layer: nn.Module) -> list[Tensor]:
    """Return a layer's own parameters: of a distributed one the same number on all its ranks."""
    blocks = layer.blocks() if isinstance(layer, PlannedModule) else {}
    return [*(p for p in blocks.values() if isinstance(p, nn.Parameter)), *layer.parameters(False)]


def _total_norm(parameters: Sequence[Tensor], p: float) -> Tensor:
    """Return the norm of all gradients together: of the norms of blocks, each block once."""
    if not parameters:
        return torch.tensor(0.0)
    dtype = reduce(torch.promote_types, (x.dtype.to_real() for x in parameters))
    wide = torch.promote_types(dtype, torch.float32)
    device = parameters[0].device
    split = _split(parameters)
    norms = [
        _norm(x.grad, p).to(wide)
        for x in parameters
        if x.grad is not None and x.numel() and id(x) not in split
    ]
    roots = {root: None for root, _ in split.values()}
    for root in roots:
        split_parameters = [(x, split[id(x)][1]) for x in parameters if id(x) in split]
        of_root = [(x, holding) for x, holding in split_parameters if split[id(x)][0] == root]
        norms += _gathered_norms(of_root, root, p, wide)
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), p).to(dtype)


def _split(parameters: Sequence[Tensor]) -> dict[int, tuple[Communicator, Holding]]:
    """Return, by identity, the parameters that not all ranks hold whole, with their ranks."""
    ids = {id(x) for x in parameters}
    by_id: dict[int, tuple[Communicator, Holding]] = {}
    for layer in living_layers():
        for name, x in layer.blocks().items():
            if id(x) in ids and not layer._replicated[name]:
                root = layer._root()
                if root is not None and root.size > 1:
                    by_id[id(x)] = root, layer._holdings[name]
    return by_id


def _gathered_norms(
    parameters: Sequence[tuple[Tensor, Holding]], comm: Communicator, p: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return the norms of all blocks of these parameters, on all ranks. Collective."""
    has_grad = [x.grad is not None and x.numel() > 0 for x, _ in parameters]
    grads = [
        x.grad if has else x.new_zeros(()) for (x, _), has in zip(parameters, has_grad, strict=True)
    ]
    values = torch.stack([_norm(g, p).to(dtype) for g in grads if g is not None]).tolist()
    said = [
        (holding, value) if has else None
        for (_, holding), value, has in zip(parameters, values, has_grad, strict=True)
    ]
    norms: list[Tensor] = []
    for blocks in zip(*comm.all_gather_object(said), strict=True):
        by_place = dict(block for block in blocks if block is not None)
        norms += [torch.tensor(value, dtype=dtype) for value in by_place.values()]
    return norms


def _norm(grad: Tensor, p: float) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.linalg.vector_norm(values.detach(), p)

"""Functions of networks with distributed layers: whole states, equal replicas, gradients later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import CollectiveMismatch, RankTimeout
from unisono.nn.module import Module
from unisono.nn.parameters import Holding, blocks_of_all, state_dict_mode, whole
from unisono.nn.planned import PlannedModule
from unisono.nn.split_tensors.module import SplitModule
from unisono.operators.gradients import EarlierGradients, GradientPolicy, reduce_gradients


def full_state_dict(module: nn.Module, *, rank: int | None = None) -> dict[str, Any]:
    """Return whole tensors under the names of the torch module. Collective over its ranks.

    Args:
        module: any module tree with distributed layers.
        rank: only this rank of the world gets them, the others an empty dict; default all do.
    """
    with state_dict_mode("full"):
        try:
            state = module.state_dict()
        except RankTimeout as error:
            hint = "call full_state_dict on all ranks; rank= says which of them gets the tensors"
            error.args = (f"{error}\n  HINT: {hint}",)
            raise
    me = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if rank is not None and rank != me:
        return {}
    return dict(state)


def check_replicas(module: nn.Module) -> None:
    """Raise on all ranks if a block that several ranks hold differs between them. Collective.

    Parameters of ordinary layers in the tree count as held by all ranks.
    """
    everyone = next((root for layer in module.modules() if (root := _root_of(layer))), None)
    for path, layer in module.named_modules():
        if isinstance(layer, PlannedModule):
            comm, holdings, values = layer._root(), layer._holdings, layer.blocks()
        else:
            comm, values = everyone, dict(layer.named_parameters(recurse=False))
            holdings = {name: whole(p.shape) for name, p in values.items()}
        if comm is None or comm.size == 1:
            continue
        for name, value in values.items():
            _compare(f"{path}.{name}".lstrip("."), value, holdings[name], comm)


def _root_of(layer: nn.Module) -> Communicator | None:
    """Return the ranks that a layer, or a split network, is spread over."""
    if isinstance(layer, SplitModule):
        return layer.partition.comm
    return layer._root() if isinstance(layer, Module) else None


def _compare(name: str, value: Tensor, holding: Holding, comm: Communicator) -> None:
    first: dict[Holding, tuple[int, Tensor]] = {}
    for rank, (holding_there, values) in enumerate(blocks_of_all(value, holding, comm)):
        other, expected = first.setdefault(holding_there, (rank, values))
        # NaN is the same as NaN.
        if not torch.allclose(expected, values, rtol=0.0, atol=0.0, equal_nan=True):
            difference = (expected - values).abs().max().item()
            raise CollectiveMismatch.because(
                f"check_replicas: {name}",
                f"ranks {comm.ranks[other]} and {comm.ranks[rank]} hold the same block",
                f"largest difference {difference:g}",
                "update parameters from their gradients only, with equal optimizers on all ranks",
            )


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Leave gradients of replicated parameters local inside the block; sum them once at its end.

    For accumulation over several backwards. Collective at its end. Layers that share a parameter
    sum in every backward: each has its own ranks.
    """
    holders = Counter(id(p) for each in module.modules() for p in each.parameters(recurse=False))
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, PlannedModule)
        and all(holders[id(p)] == 1 for p in layer.parameters(recurse=False))
    ]
    before = [(layer, layer._sums_gradients) for layer in layers]
    held = [
        (layer, name, p)
        for layer in layers
        for name, p in layer.named_parameters(recurse=False)
        if name in layer._holdings
    ]
    earlier = EarlierGradients(p for _, _, p in held)
    for layer in layers:
        layer._sums_gradients = False
    try:
        with ExitStack() as inside:
            for part in module.modules():
                if isinstance(part, SplitModule):
                    inside.enter_context(part.no_sync())
            yield
    except BaseException:
        earlier.put_back()  # what the block has added is not summed, and would not be alike
        raise
    finally:
        for layer, flag in before:
            layer._sums_gradients = flag
    users = [(p, layer._gradient_comm(name)) for layer, name, p in held]
    reduce_gradients((p, GradientPolicy(sum_over=(comm,))) for p, comm in users if comm is not None)
    earlier.add()

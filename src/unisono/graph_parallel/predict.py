"""`parallel_predict`: one big system through a graph-parallel model, from a plain process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from unisono.comm import world
from unisono.graph_parallel.groups import use_groups
from unisono.graph_parallel.matrix import graph_groups
from unisono.launch import run

T = TypeVar("T")


def parallel_predict(model: Callable[[Any], T], batch: Any, workers: int = 4) -> T:
    """Return `model(batch)`, computed by `workers` ranks that share the graph.

    The model is a callable written with regions or a `GraphPlan`; it is copied to the ranks, its
    replicated result comes back from the first one, detached. In a process that is a rank already,
    the ranks of that world do it.

    Args:
        model: module or function of one argument.
        batch: its argument: tensors, or anything that can be pickled.
        workers: number of ranks, on this host.
    """
    return run(_predict, model, batch, ranks=workers)[0]


def _predict(model: Callable[[Any], Any], batch: Any) -> Any:
    with use_groups(graph_groups(world().size)):
        return _detached(model(batch))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_detached(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value

"""The layers of a model: their shares of its time, their shapes, and the buckets they fill."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from unisono.data_parallel.bucket import plan_buckets
from unisono.data_parallel.engine import NETWORK_MB
from unisono.plan.subject import Subject
from unisono.plan.workload import Layer, SentBucket, Window

__all__ = ["measured_layers", "nbytes", "sent_buckets"]


def nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules without children, or with parameters of their own, in order."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        owns = any(True for _ in module.parameters(recurse=False))
        if not inside and (owns or not any(True for _ in module.children())):
            found.append((name, module))
    return found


def measured_layers(subject: Subject, rounds: int) -> list[Layer]:
    """Return the leaves in the order in which forward reaches them, with their shares of it."""
    model = cast("nn.Module", subject.model)
    spent: dict[nn.Module, list[float]] = {}
    shapes: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    started: dict[nn.Module, float] = {}
    handles: list[Any] = []

    def begin(module: nn.Module, _: Any) -> None:
        started[module] = time.perf_counter()

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        spent.setdefault(module, []).append(time.perf_counter() - started[module])
        shapes.setdefault(module, (_sample_shape(inputs), _sample_shape(output)))

    leaves = _leaves(model)
    for _, module in leaves:
        handles += [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end),
        ]
    whole: list[float] = []
    try:
        for _ in range(rounds):
            start = time.perf_counter()
            model(*subject.batch)
            whole.append(time.perf_counter() - start)
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in leaves}
    # A module that forward uses n times has n times in each round; their sum counts.
    shares = {module: _median_share(times, whole) for module, times in spent.items()}
    total = max(1.0, math.fsum(shares.values()))
    return [
        Layer(
            name=names[module] or "-",
            kind=_kind(module),
            parameter_bytes=sum(map(nbytes, module.parameters())),
            share=share / total,
            input_shape=shapes[module][0],
            output_shape=shapes[module][1],
            window=_window(module),
        )
        for module, share in shares.items()
    ]


def _median_share(times: Sequence[float], whole: Sequence[float]) -> float:
    """Return the share of each round's whole, in the median: a busy machine disturbs it least."""
    uses = len(times) // len(whole)
    rounds = (sum(times[i * uses : (i + 1) * uses]) for i in range(len(whole)))
    return statistics.median(
        part / all_of_it for part, all_of_it in zip(rounds, whole, strict=True)
    )


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "Linear"
    return "Attention" if isinstance(module, nn.MultiheadAttention) else type(module).__name__


def _sample_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of the first tensor without its first dim."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else ()


def _window(module: nn.Module) -> Window | None:
    """Return what the layer reads around a point."""
    m = cast("Any", module)
    name = type(module).__name__
    if not (name[:-2] in ("Conv", "MaxPool", "AvgPool") and name[-2:] in ("1d", "2d", "3d")):
        return None
    dims = int(name[-2])

    def each(value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple) else (value,) * dims

    return Window(
        kernel=each(m.kernel_size), stride=each(m.stride), dilation=each(getattr(m, "dilation", 1))
    )


def sent_buckets(model: nn.Module, layers: Sequence[Layer]) -> list[SentBucket]:
    """Return the buckets that `DataParallel` would send, with their places in the passes."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    kinds = [(nbytes(p), (p.device, p.dtype)) for _, p in named]
    before = [0.0]
    for layer in layers:
        before.append(before[-1] + layer.share)
    places = {layer.name: i for i, layer in enumerate(layers)}

    def place(parameter: str) -> int:
        path = parameter.split(".")
        outer = (".".join(path[:i]) or "-" for i in range(len(path) - 1, -1, -1))
        return next((places[name] for name in outer if name in places), 0)

    found: list[SentBucket] = []
    for members in plan_buckets(kinds, NETWORK_MB * 2**20):
        first = min(place(named[i][0]) for i in members)
        size = sum(kinds[i][0] for i in members)
        found.append(SentBucket(nbytes=size, ready=1 - before[first], needed=before[first]))
    return found

"""Measure a model on one core: times of its passes, its layers, and what it keeps."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.bayes import OutputUpdater, Sequential
from unisono.operators.gradients import BUCKET_MB, plan_buckets
from unisono.plan.subject import Subject
from unisono.plan.workload import Layer, SentBucket, Workload, fit_pace
from unisono.topology.window import per_dim

_ROUNDS = 7
_ROUND_S = 0.12
"""A size is measured until a round has taken this long."""
_NOISE = 0.5

Step = Callable[[], list[float]]
"""Makes one step and returns the seconds of forward, backward and update."""


def profile(subject: Subject) -> Workload:
    """Return the workload of `subject`, measured in this process with one thread. Local.

    The model's parameters are trained a few steps, so give a model that is made for this.
    """
    whole = subject.samples
    sizes = sorted({max(1, whole // 4), max(1, whole // 2), whole})
    with one_thread():
        times = _measure([step_of(subject, samples) for samples in sizes])
        layers = [] if isinstance(subject.model, Sequential) else _measured_layers(subject)
    forward, backward, update = zip(*times, strict=True)
    common: dict[str, Any] = {
        "name": subject.name,
        "forward": fit_pace(sizes, forward),
        "backward": fit_pace(sizes, backward),
        "optimizer_s": statistics.median(update),
    }
    if isinstance(subject.model, Sequential):
        return Workload(**common, **_bayesian_sizes(subject.model))
    parameters = _trained(subject.model)
    kept = _kept_bytes(subject.model, lambda: subject.loss(subject.model(*subject.batch))) / whole
    return Workload(
        **common,
        parameter_bytes=sum(map(_nbytes, parameters)),
        state_bytes=_state_bytes(subject),
        activation_bytes=kept,
        buckets=_sent_buckets(subject.model, layers),
        layers=layers,
        graph=subject.graph,
        item_bytes=parameters[0].element_size() if parameters else 4,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one core inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_of(subject: Subject, samples: int | None = None) -> Step:
    """Return a function that trains one step on the first `samples` of the batch."""
    batch = tuple(x[:samples] for x in subject.batch)
    model = subject.model
    if isinstance(model, Sequential):
        return _bayesian_step(model, batch)
    optimizer = subject.optimizer(model.parameters())
    losses: list[Tensor] = []

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _timed(
        lambda: losses.append(subject.loss(model(*batch))),
        lambda: losses.pop().backward(),
        update,
    )


def _bayesian_step(model: Sequential, batch: Sequence[Tensor]) -> Step:
    updater = OutputUpdater(model.device)
    target = torch.zeros_like(cast("Tensor", model(*batch)[0]))

    def backward() -> None:
        updater.update(model.output_z_buffer, target, _NOISE, model.input_delta_z_buffer)
        model.backward()

    return _timed(lambda: model(*batch), backward, model.step)


def _timed(*parts: Callable[[], object]) -> Step:
    """Return a function that does the parts of a step and returns the seconds of each."""

    def step() -> list[float]:
        marks = [time.perf_counter()]
        for part in parts:
            part()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]

    return step


def _measure(steps: Sequence[Step]) -> list[tuple[float, ...]]:
    """Return for each kind of step the medians of its parts; all take turns."""
    counts: list[int] = []
    for step in steps:
        step()
        counts.append(max(1, min(50, round(_ROUND_S / max(sum(step()), 1e-6)))))
    rounds: list[list[tuple[float, ...]]] = [[] for _ in steps]
    for _ in range(_ROUNDS):
        for step, count, times in zip(steps, counts, rounds, strict=True):
            parts = zip(*(step() for _ in range(count)), strict=True)
            times.append(tuple(statistics.fmean(part) for part in parts))
    return [tuple(map(statistics.median, zip(*times, strict=True))) for times in rounds]


def _kept_bytes(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps from forward to backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        _ = forward()  # held until all is counted, so that no address comes twice
    return sum(kept.values())


def _state_bytes(subject: Subject) -> int:
    """Return what the optimizer keeps after a step."""
    model = cast("nn.Module", subject.model)
    optimizer = subject.optimizer(model.parameters())
    subject.loss(model(*subject.batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = (x for state in optimizer.state.values() for x in state.values())
    return sum(_nbytes(x) for x in kept if isinstance(x, Tensor) and x.dim())


def _bayesian_sizes(model: Sequential) -> dict[str, Any]:
    """Return sizes of a net of means and variances: one bucket with the deltas of both."""
    arena = model.arena
    item = arena.mean.element_size()
    both = 2 * arena.size * item
    # Means, variances and slopes of every unit stay until backward.
    units = sum(layer.output_size for _, layer in model.leaves())
    return {
        "parameter_bytes": both,
        "state_bytes": 0,
        "activation_bytes": 3.0 * item * units,
        "buckets": [SentBucket(nbytes=both, ready=1.0, needed=0.0)],
        "is_bayesian": True,
        "item_bytes": item,
    }


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# -- layers: their shares of the time, their shapes, and the buckets they fill ------------------


def _nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules without children, or with parameters of their own, in order."""
    leaves: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in leaves)
        owns = any(True for _ in module.parameters(recurse=False))
        if not inside and (owns or not any(True for _ in module.children())):
            leaves.append((name, module))
    return leaves


def _measured_layers(subject: Subject) -> list[Layer]:
    """Return the leaves in the order in which forward reaches them, with their shares of it."""
    model = cast("nn.Module", subject.model)
    spent: dict[nn.Module, list[float]] = {}
    shapes: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    started: dict[nn.Module, float] = {}

    def begin(module: nn.Module, _: Any) -> None:
        started[module] = time.perf_counter()

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        spent.setdefault(module, []).append(time.perf_counter() - started[module])
        shapes.setdefault(module, (_sample_shape(inputs), _sample_shape(output)))

    leaves = _leaves(model)
    whole: list[float] = []
    with ExitStack() as hooks:
        for _, module in leaves:
            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            model(*subject.batch)
            whole.append(time.perf_counter() - start)
    names = {module: name for name, module in leaves}
    trained = dict.fromkeys(_trained(model))  # each once, in the first layer that has it
    owned = {m: [p for p in m.parameters() if trained.pop(p, 0) is None] for m in spent}
    # A module that forward uses n times has n times in each round; their sum counts.
    shares = {module: _median_share(times, whole) for module, times in spent.items()}
    total = max(1.0, math.fsum(shares.values()))
    return [
        Layer(
            name=names[module] or "-",
            kind="Linear" if isinstance(module, nn.Linear) else type(module).__name__,
            parameter_bytes=sum(map(_nbytes, owned[module])),
            share=share / total,
            input_shape=shapes[module][0],
            output_shape=shapes[module][1],
            reach=_reach(module),
        )
        for module, share in shares.items()
    ]


def _reach(module: nn.Module) -> tuple[int, ...]:
    """Return how many points beyond a block a layer reads along each spatial dim, in all."""
    count = next((n for n in (1, 2, 3) if type(module).__name__.endswith(f"{n}d")), 0)
    if not count or not hasattr(module, "kernel_size"):
        return ()
    names = ("kernel_size", "stride", "dilation")
    kernel, stride, dilation = (per_dim(getattr(module, n, 1), count, n) for n in names)
    reads = zip(kernel, stride, dilation, strict=True)
    return tuple(max(0, d * (k - 1) + 1 - s) for k, s, d in reads)


def _median_share(times: Sequence[float], whole: Sequence[float]) -> float:
    """Return the share of each round's whole, in the median: a busy machine disturbs it least."""
    uses = len(times) // len(whole)
    rounds = (sum(times[i * uses : (i + 1) * uses]) for i in range(len(whole)))
    return statistics.median(
        part / all_of_it for part, all_of_it in zip(rounds, whole, strict=True)
    )


def _sample_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of the first tensor without its first dim."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return tuple(value.shape[1:]) if isinstance(value, Tensor) else ()


def _sent_buckets(model: nn.Module, layers: Sequence[Layer]) -> list[SentBucket]:
    """Return the buckets that `DataParallel` would send, with their places in the passes."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    kinds = [(_nbytes(p), (p.device, p.dtype)) for _, p in named]
    before = [0.0]
    for layer in layers:
        before.append(before[-1] + layer.share)
    places = {layer.name: i for i, layer in enumerate(layers)}

    def place(parameter: str) -> int:
        path = parameter.split(".")
        outer = (".".join(path[:i]) or "-" for i in range(len(path) - 1, -1, -1))
        return next((places[name] for name in outer if name in places), 0)

    buckets: list[SentBucket] = []
    for members in plan_buckets(kinds, BUCKET_MB * 2**20):
        first = min(place(named[i][0]) for i in members)
        size = sum(kinds[i][0] for i in members)
        buckets.append(SentBucket(nbytes=size, ready=1 - before[first], needed=before[first]))
    return buckets

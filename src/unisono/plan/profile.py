"""Measuring a model on one core: times of its passes, its layers, what it keeps and sends."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.bayes import OutputUpdater, Sequential
from unisono.errors import PartitionError
from unisono.graph_parallel import GraphPartition
from unisono.nn.distribute.report import rehearsed
from unisono.nn.distribute.traffic import on_paper
from unisono.plan.layers import measured_layers, nbytes, sent_buckets
from unisono.plan.subject import GraphInput, Subject
from unisono.plan.workload import (
    GraphCut,
    GraphLoad,
    SentBucket,
    SpaceCut,
    Workload,
    fit_pace,
)
from unisono.topology import Partition

__all__ = ["one_thread", "profile", "step_of"]

_ROUNDS = 7
_ROUND_S = 0.12
"""A size is measured until a round has taken this long."""
_PARTS = 64
"""Graphs are cut over powers of two up to this many ranks."""
_NOISE = 0.5

Step = Callable[[], list[float]]
"""Makes one step and returns the seconds of forward, backward and update."""


def profile(subject: Subject, *, team: int = 1) -> Workload:
    """Return the workload of `subject`, measured in this process with one thread. Local.

    The model's parameters are trained a few steps, so give a model that is made for this.

    Args:
        subject: model and batch.
        team: a number of ranks that may share a graph, beside the powers of two.
    """
    whole = subject.samples
    sizes = sorted({max(1, whole // 4), max(1, whole // 2), whole})
    with one_thread():
        times = _measure([step_of(subject, samples) for samples in sizes])
        layers = [] if isinstance(subject.model, Sequential) else measured_layers(subject, _ROUNDS)
    forward, backward, update = zip(*times, strict=True)
    common: dict[str, Any] = {
        "name": subject.name,
        "forward": fit_pace(sizes, forward),
        "backward": fit_pace(sizes, backward),
        "optimizer_s": statistics.median(update),
    }
    if isinstance(subject.model, Sequential):
        return Workload(**common, **_bayesian_sizes(subject.model))
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    return Workload(
        **common,
        parameter_bytes=sum(map(nbytes, parameters)),
        state_bytes=_state_bytes(subject),
        activation_bytes=_kept_bytes(subject) / whole,
        buckets=sent_buckets(subject.model, layers),
        layers=layers,
        graph=None if subject.graph is None else _graph_load(subject.graph, team),
        space=_space_cuts(subject, [layer.name for layer in layers]),
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

    def step() -> list[float]:
        marks = [time.perf_counter()]
        loss = subject.loss(model(*batch))
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]

    return step


def _bayesian_step(model: Sequential, batch: Sequence[Tensor]) -> Step:
    updater = OutputUpdater(model.device)
    target = torch.zeros_like(cast("Tensor", model(*batch)[0]))

    def step() -> list[float]:
        marks = [time.perf_counter()]
        model(*batch)
        marks.append(time.perf_counter())
        updater.update(model.output_z_buffer, target, _NOISE, model.input_delta_z_buffer)
        model.backward()
        marks.append(time.perf_counter())
        model.step()
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
        for step, count, found in zip(steps, counts, rounds, strict=True):
            parts = zip(*(step() for _ in range(count)), strict=True)
            found.append(tuple(statistics.fmean(part) for part in parts))
    return [tuple(map(statistics.median, zip(*found, strict=True))) for found in rounds]


def _kept_bytes(subject: Subject) -> int:
    """Return the bytes that autograd keeps from forward to backward, parameters left out."""
    model = cast("nn.Module", subject.model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        subject.loss(model(*subject.batch))
    return sum(kept.values())


def _state_bytes(subject: Subject) -> int:
    """Return what the optimizer keeps after a step."""
    model = cast("nn.Module", subject.model)
    optimizer = subject.optimizer(model.parameters())
    subject.loss(model(*subject.batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = (x for state in optimizer.state.values() for x in state.values())
    return sum(nbytes(x) for x in kept if isinstance(x, Tensor) and x.dim())


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


def _space_cuts(subject: Subject, names: Sequence[str]) -> dict[tuple[int, ...], SpaceCut]:
    """Ask `distribute` about every choice of spatial dims, on paper."""
    dims = subject.batch[0].dim() - 2
    choices = (
        chosen
        for count in range(1, dims + 1)
        for chosen in itertools.combinations(range(dims), count)
    )
    return {chosen: _space_cut(subject, names, chosen) for chosen in choices if dims <= 3}


def _space_cut(subject: Subject, names: Sequence[str], chosen: Sequence[int]) -> SpaceCut:
    inputs = [torch.empty_like(x, device="meta") for x in subject.batch]
    dims = inputs[0].dim() - 2
    grid = Partition(
        [1, 1, *(2 if d in chosen else 1 for d in range(dims))],
        comm=on_paper(range(2 ** len(chosen)), 0),
    )
    refusal = ""
    for custom in ("refuse", "recurse"):
        try:
            calls = rehearsed(cast("nn.Module", subject.model), inputs, grid, custom=custom)
        except PartitionError as error:
            asked, *found = (line.strip() for line in str(error).splitlines())
            refusal = ": ".join([asked, *(line.removeprefix("found: ") for line in found[:1])])
            continue
        except Exception as error:  # of the user's own forward, on tensors without data
            refusal = f"forward on tensors without data: {type(error).__name__}: {error}"
            continue
        whole = {call.path for call in calls if not call.is_split}
        split = {call.path for call in calls} - whole

        def is_split(name: str, split: set[str] = split, whole: set[str] = whole) -> bool:
            own, inner = name.removeprefix("-"), f"{name}."
            seen = [path for path in split | whole if path == own or path.startswith(inner)]
            return bool(seen) and not whole.intersection(seen)

        return SpaceCut(layers=frozenset(filter(is_split, names)), custom=custom)
    return SpaceCut(refusal=refusal)


def _graph_load(graph: GraphInput, team: int) -> GraphLoad:
    """Return what the graph costs, split as `GraphPartition` does it best."""
    powers = [2**i for i in range(1, _PARTS.bit_length())]
    cuts: dict[int, GraphCut] = {}
    for parts in sorted({*powers, team} - {1}):
        if 2 * parts > graph.nodes:
            break
        split = (
            GraphPartition.balanced(graph.edge_index, graph.nodes, parts)
            if graph.pos is None
            else GraphPartition.balanced(
                graph.edge_index, graph.nodes, parts, order="morton", pos=graph.pos
            )
        )
        stats = split.stats(graph.edge_index)
        rows = max(stats.halo_per_rank)
        cuts[parts] = GraphCut(
            halo_rows=rows, neighbours=min(parts - 1, 8), imbalance=stats.edge_imbalance
        )
    return GraphLoad(
        nodes=graph.nodes, row_bytes=graph.row_bytes, exchanges=graph.exchanges, cuts=cuts
    )

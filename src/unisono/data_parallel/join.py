"""Uneven numbers of batches: ranks that have run out take part in the others' collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.comm.engines.algorithms import forcing
from unisono.data_parallel.construction import broadcast_module
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.naming import Unfinished, named
from unisono.data_parallel.optimizer import DataParallelOptimizer
from unisono.data_parallel.partial_step import only_observes
from unisono.data_parallel.weighting import Weights
from unisono.errors import explain
from unisono.expect import one_line


class Stateful(Protocol):
    """What is stepped once a batch: an optimizer, a scheduler, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take the state of another rank."""
        ...


class Join:
    """One `join` block of a rank.

    Args:
        engine: whose collectives are shadowed.
        weights: told how many ranks still count.
        attached: optimizers of the `DataParallel`.
        given: what else steps with the batches. Optimizers that hold parameters of the module and
            step inside are found without it.
    """

    def __init__(
        self,
        engine: GradientEngine,
        weights: Weights,
        attached: Sequence[DataParallelOptimizer],
        given: Sequence[object],
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._attached = attached
        self._last_source: int | None = None
        self._batches = 0
        self._own = {id(p) for p in engine.module.parameters()}
        self._stepped: dict[int, Stateful] = {}
        self._first_rates: dict[int, list[float]] = {}
        for optimizer in attached:
            self._note(optimizer)
        for one in given:
            _check_stateful(one)
            of_scheduler = getattr(one, "optimizer", None)
            if isinstance(of_scheduler, optim.Optimizer):
                self._note(of_scheduler)
            self._note(one)

    def _note(self, one: Any) -> None:
        """Bring the state of `one` together in the end; an optimizer of ours is the one inside."""
        inner = one.torch_optimizer if isinstance(one, DataParallelOptimizer) else one
        if id(inner) not in self._stepped:
            self._stepped[id(inner)] = one
            if isinstance(inner, optim.Optimizer):
                self._first_rates[id(inner)] = _rates(inner)

    @only_observes
    def _saw_step(self, optimizer: optim.Optimizer, *_: object) -> None:
        known = id(optimizer) in self._stepped
        if not known and any(
            id(p) in self._own for g in optimizer.param_groups for p in g["params"]
        ):
            self._note(optimizer)

    def before_forward(self) -> int:
        """Tell all ranks that this one has a batch; returns the rank whose buffers all take.

        Collective over the ranks.
        """
        self._batches += 1
        source, _ = self._exchange(has_data=True)
        return 0 if source is None else source

    @contextlib.contextmanager
    def block(self, divide_by_world: bool) -> Iterator[None]:
        """Run the user's loop, then shadow the others until nobody has data. Collective."""
        self._weights.joining, self._weights.divide_by_world = True, divide_by_world
        hook = register_optimizer_step_post_hook(self._saw_step)
        try:
            yield
            for optimizer in self._attached:
                optimizer.finalize()
            with torch.enable_grad():
                self._shadow()
            self._make_equal()
        finally:
            hook.remove()
            self._weights.joining, self._weights.divide_by_world = None, False

    def _exchange(self, has_data: bool) -> tuple[int | None, bool]:
        """Return the lowest rank with data, None if there is none, and whether they synchronise."""
        mine = [int(has_data), int(has_data and self._engine.require_sync)]
        try:
            with forcing("all_gather", "native"):  # as in `Weights`: never taken for a bucket
                rows = self._engine.comm.all_gather_ints(mine)
        except Unfinished as error:
            raise named(error, "who has data left, from join()") from None
        source = next((rank for rank, (active, _) in enumerate(rows) if active), None)
        if source is not None:
            self._last_source = source
        return source, any(syncs for _, syncs in rows)

    def _shadow(self) -> None:
        while True:
            source, syncs = self._exchange(has_data=False)
            if source is None:
                return
            if syncs:
                # What `no_sync` has accumulated here counts once more, then there is nothing left.
                brings = self._engine.holds_unsent
                self._weights.joining = brings
                self._engine.before_forward(source, shadowing=True)
                self._engine.shadow_backward(brings)

    def _make_equal(self) -> None:
        comm, source = self._engine.comm, self._last_source
        if source is None or comm.size == 1:
            return
        stepped = list(self._stepped.values())
        optimizers = [x for x in stepped if isinstance(x, optim.Optimizer)]
        rates = [_rates(x) for x in optimizers]
        before = list(self._first_rates.values())
        mine = (self._batches, [_describe(x) for x in stepped], rates, rates != before)
        reports = comm.all_gather_object(mine)
        batches = [report[0] for report in reports]
        _check_found(batches, [report[1] for report in reports])
        if not any(_is_schedule(x) for x in stepped):
            _check_rates(batches, [report[2] for report in reports], any(r[3] for r in reports))
        broadcast_module(self._engine.module, comm, source)
        if len(set(batches)) == 1:
            return  # all have made the same steps
        states = [x.state_dict() for x in stepped] if comm.rank == source else None
        states = comm.broadcast_object(states, source)
        if comm.rank != source:
            for one, state in zip(stepped, states, strict=True):
                one.load_state_dict(state)


def _rates(optimizer: optim.Optimizer) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def _describe(one: Stateful) -> str:
    if isinstance(one, DataParallelOptimizer):
        one = one.torch_optimizer
    if isinstance(one, optim.Optimizer):
        return f"{type(one).__name__} of {sum(len(g['params']) for g in one.param_groups)} tensors"
    return type(one).__name__


def _is_schedule(one: Stateful) -> bool:
    return not isinstance(one, optim.Optimizer | torch.amp.GradScaler | nn.Module)


def _check_stateful(one: object) -> None:
    names = ("state_dict", "load_state_dict")
    if isinstance(one, type) or not all(callable(getattr(one, name, None)) for name in names):
        raise TypeError(
            explain(
                f"join({one_line(one)})",
                f"{type(one).__name__}, without state_dict() and load_state_dict()",
                None,
                "join(optimizer, scheduler), whatever is stepped inside",
            )
        )


def _check_found(batches: list[int], found: list[list[str]]) -> None:
    """Raise on all ranks unless they know of the same optimizers."""
    if all(known == found[0] for known in found):
        return
    other = next(rank for rank, known in enumerate(found) if known != found[0])
    lines = [f"rank {r}: {batches[r]} batches, {', '.join(found[r]) or '-'}" for r in (0, other)]
    raise ValueError(
        explain(
            "join(), which gives all ranks the same optimizer state at its end",
            "ranks that do not know of the same optimizers; one is found at its first step inside",
            "\n".join(lines),
            "with model.join(optimizer): on every rank, with all that is stepped inside",
        )
    )


def _check_rates(batches: list[int], rates: list[list[list[float]]], changed: bool) -> None:
    """Raise on all ranks if a schedule that nobody has named has gone different ways."""
    if changed and (len(set(batches)) > 1 or any(mine != rates[0] for mine in rates)):
        lines = [
            f"rank {rank}: {count} batches, learning rates {mine}"
            for rank, (count, mine) in enumerate(zip(batches, rates, strict=True))
        ]
        raise ValueError(
            explain(
                "join() with a learning rate that changes inside",
                "ranks have stepped their schedulers differently often, and would go on so",
                "\n".join(lines),
                "with model.join(scheduler):, which gives it the same state on all ranks; write a "
                "schedule of your own as torch.optim.lr_scheduler.LambdaLR",
            )
        )

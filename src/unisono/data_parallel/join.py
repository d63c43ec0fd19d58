"""Uneven numbers of batches: ranks that have run out take part in the others' collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from unisono.comm.algorithms import forcing
from unisono.data_parallel.construction import broadcast_module
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.naming import Unfinished, named
from unisono.data_parallel.optimizer import DataParallelOptimizer
from unisono.data_parallel.weighting import Weights


class Join:
    """One `join` block of a rank.

    Args:
        engine: whose collectives are shadowed.
        weights: told how many ranks still count.
        optimizers: their state is made equal at the end.
    """

    def __init__(
        self,
        engine: GradientEngine,
        weights: Weights,
        optimizers: Sequence[DataParallelOptimizer],
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._optimizers = optimizers
        self._last_source: int | None = None

    def before_forward(self) -> int:
        """Tell all ranks that this one has a batch; returns the rank whose buffers all take.

        Collective over the ranks.
        """
        source, _ = self._exchange(has_data=True)
        return 0 if source is None else source

    @contextlib.contextmanager
    def block(self, divide_by_world: bool) -> Iterator[None]:
        """Run the user's loop, then shadow the others until nobody has data. Collective."""
        self._weights.joining, self._weights.divide_by_world = True, divide_by_world
        try:
            yield
            for optimizer in self._optimizers:
                optimizer.finalize()
            self._weights.joining = False
            with torch.enable_grad():
                self._shadow()
            self._make_equal()
        finally:
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
                self._engine.before_forward(source, shadowing=True)
                self._engine.shadow_backward()

    def _make_equal(self) -> None:
        comm, source = self._engine.comm, self._last_source
        if source is None or comm.size == 1:
            return
        broadcast_module(self._engine.module, comm, source)
        for optimizer in self._optimizers:
            mine = optimizer.state_dict() if comm.rank == source else None
            state = comm.broadcast_object(mine, source)
            if comm.rank != source:
                optimizer.load_state_dict(state)

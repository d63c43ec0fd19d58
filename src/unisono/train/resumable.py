"""`Resumable`: a loader that knows how far it has come, and goes on from there after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from unisono.comm import Communicator
from unisono.data_parallel import DataLoader as RankLoader
from unisono.data_parallel import DistributedSampler as RankSampler
from unisono.errors import CheckpointError

__all__ = ["Resumable"]


class Resumable:
    """A loader with a position, for `Checkpoint`.

    Iterating it is one epoch: the sampler gets its number, if it has `set_epoch`. After
    `load_state_dict` the next iteration yields what was left of the epoch that was interrupted, in
    the order it had; batches that were trained on are not loaded again. With another number of
    ranks or another batch size it begins at the same sample, rounded down to a whole batch.

    Args:
        loader: torch's `DataLoader`, of a dataset with a length, or unisono's.
        comm: the ranks that share an epoch's samples; None: the world.

    >>> loader = Resumable(DataLoader(torch.arange(6), batch_size=2))
    >>> for batch in loader:
    ...     if batch[0] == 2:
    ...         state = loader.state_dict()  # after the second of three batches
    >>> again = Resumable(DataLoader(torch.arange(6), batch_size=2))
    >>> again.load_state_dict(state)
    >>> [batch.tolist() for batch in again], again.epoch
    ([[4, 5]], 1)
    """

    def __init__(self, loader: Any, *, comm: object = None) -> None:
        inner = loader.DataLoader if isinstance(loader, RankLoader) else loader
        if not isinstance(inner, DataLoader) or isinstance(inner.dataset, IterableDataset):
            raise CheckpointError.because(
                f"Resumable({type(loader).__name__})",
                "not a loader of a dataset with a length",
                hint="Resumable(DataLoader(dataset, ...)); a stream keeps its own position",
            )
        self.loader = loader
        self.epoch = 0
        """Epochs that are done."""
        self.batch = 0
        """Batches of the current epoch that were handed out."""
        self._inner: DataLoader[Any] = inner
        self._comm = Communicator.of(comm)
        self._order: list[Tensor] | None = None
        """States of the generators that drew the order of the current epoch."""
        self._draws = True
        """Whether the loader drew a number of its own before it; workers that stay do that once."""

    def __len__(self) -> int:
        """Number of batches of a whole epoch."""
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this epoch that are left."""
        self._announce()
        if self.batch and self._order is not None:
            now, inner = self._states(), self._inner
            rest = _Rest(inner.batch_sampler or inner.sampler, self.batch)
            self._set_states(self._order)
            if not self._draws:
                rest.begin()
            batches = iter(self._with(rest))
            rest.begin()  # after the iterator's own draw, as in an epoch that was not interrupted
            self._set_states(now)
        else:
            self.batch, self._order = 0, self._states()
            self._draws = self._inner._iterator is None or not self._inner.persistent_workers
            batches = iter(self._inner)
        for batch in batches:
            self.batch += 1
            yield batch
        self.epoch, self.batch, self._order = self.epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position. Local."""
        sampler = self._inner.sampler
        moves_rows = isinstance(sampler, RankSampler) and sampler.shuffle
        return {
            "epoch": self.epoch,
            "seed": getattr(sampler, "seed", None) if moves_rows else None,  # it may be drawn
            "samples": self.batch * self._samples_per_batch(),
            "order": self._order and self._order[0],
            "other_orders": self._order and self._order[1:],
            "draws": self._draws,
            **{name: g and g.get_state() for name, g in self._loader_generators().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration at this position.

        Collective if a sampler moves the loader's rows between ranks: it gets the seed they had.
        """
        if isinstance(self._inner.sampler, RankSampler) and state.get("seed") is not None:
            self._inner.sampler.set_seed(state["seed"])
        self.epoch, order = state["epoch"], state["order"]
        # Version 0.2.0 knew one generator, and no workers that stay.
        self._order = None if order is None else [order, *state.get("other_orders", ())]
        self._draws = state.get("draws", True)
        for name, generator in self._loader_generators().items():
            if generator is not None and state.get(name) is not None:
                generator.set_state(state[name])
        self.batch = state["samples"] // self._samples_per_batch()

    def _samples_per_batch(self) -> int:
        """Return the samples of a step over all ranks; 1 where batches differ in size."""
        return (self._inner.batch_size or 1) * self._comm.size

    def _announce(self) -> None:
        """Let samplers know the epoch; rows that ranks pass on move as in the epochs before."""
        if isinstance(self.loader, RankLoader):
            # Rows that move have moved for this epoch if it was begun here, and cannot go back.
            moves_rows = hasattr(self.loader.dataset, "ishuffle")
            if not (moves_rows and self.batch and self.loader.epoch == self.epoch + 1):
                self.loader.go_to_epoch(self.epoch)
                self.loader.begin_epoch()
            return
        for sampler in (self._inner.sampler, self._inner.batch_sampler):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)

    def _with(self, rest: _Rest) -> DataLoader[Any]:
        """Return a loader like the one inside for the rest of its batches."""
        inner = self._inner
        is_batched = inner.batch_sampler is not None
        return DataLoader(
            inner.dataset,
            batch_size=1 if is_batched else None,
            sampler=None if is_batched else cast("Any", rest),
            batch_sampler=rest if is_batched else None,
            num_workers=inner.num_workers,
            collate_fn=inner.collate_fn,
            pin_memory=inner.pin_memory,
            timeout=inner.timeout,
            worker_init_fn=inner.worker_init_fn,
            multiprocessing_context=inner.multiprocessing_context,
            generator=inner.generator,
            prefetch_factor=inner.prefetch_factor,
        )

    def _loader_generators(self) -> dict[str, torch.Generator | None]:
        sampler = getattr(self._inner.batch_sampler, "sampler", self._inner.sampler)
        generator = getattr(sampler, "generator", None)
        is_one = isinstance(generator, torch.Generator)
        return {"generator": self._inner.generator, "sampler": generator if is_one else None}

    def _generators(self) -> list[torch.Generator]:
        """Return those that the order of an epoch may be drawn from, the loader's first."""
        generators = self._loader_generators()
        candidates = (generators["generator"], torch.default_generator, generators["sampler"])
        return list(dict.fromkeys(g for g in candidates if g is not None))

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)


class _Rest:
    """A batch sampler, or a sampler, without its first items."""

    def __init__(self, batches: Any, first: int) -> None:
        self._batches, self._first = batches, first
        self._remaining: Iterator[Any] | None = None

    def begin(self) -> Iterator[Any]:
        """Draw the order of the epoch, and pass over the first items, once."""
        if self._remaining is None:
            self._remaining = iter(self._batches)
            for _ in range(self._first):
                next(self._remaining, None)
        return self._remaining

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.begin())

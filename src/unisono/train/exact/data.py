"""Which samples a shard holds: a pure map of seed, step and shard; and fetching them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from unisono.comm.digest import digest
from unisono.errors import PlatformError
from unisono.launch.elastic.coordinator import Run, split
from unisono.operators.gradients import tensors_in
from unisono.train.exact.shards import fresh
from unisono.train.generators import (
    random_states,
    seed_generators,
    seed_of,
    set_random_states,
)


class LabelledBatch(NamedTuple):
    """A batch of inputs and targets."""

    x: Any
    y: Any


class Shards(Dataset[Any]):
    """The shards of all steps; `shards[step, shard]` is a batch.

    Args:
        data: a dataset with a length, or tensors of equal length.
        batch_size: samples of a step.
        shards: into how many a step is cut.
        seed: of the order, and of what a dataset draws.
        shuffle: whether each epoch has an order of its own.
        collate: makes a batch of a list of samples.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        shards: int,
        seed: int,
        *,
        shuffle: bool,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        if isinstance(data, Tensor):
            data = (data,)
        if isinstance(data, (tuple, list)) and data and all(isinstance(t, Tensor) for t in data):
            lengths = [len(t) if t.dim() else 0 for t in data]
            if len(set(lengths)) > 1:
                raise PlatformError.because(
                    f"elastic(..., data) with tensors of {lengths} samples",
                    "sample i is element i of each of them",
                    " != ".join(map(str, dict.fromkeys(lengths))),
                    "tensors of one length, as in (x, y)",
                )
            data = TensorDataset(*data)
        if isinstance(data, IterableDataset) or not (
            hasattr(data, "__len__") and hasattr(data, "__getitem__")
        ):
            raise PlatformError.because(
                f"elastic(..., data={type(data).__name__})",
                "no length and no samples by number: a shard could not be fetched a second time",
                hint="a dataset with __len__ and __getitem__, or a tuple of tensors",
            )
        if len(data) < batch_size:
            raise PlatformError.because(
                f"elastic(..., batch_size={batch_size})",
                f"{len(data)} samples",
                f"{batch_size} > {len(data)}",
                f"batch_size={len(data)} or less" if len(data) else "data with samples in it",
            )
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.samples = len(data)
        self.cuts = split(batch_size, shards)
        self.steps_per_epoch = self.samples // batch_size
        self.shuffle, self._collate = shuffle, collate
        self._order: tuple[int, Tensor] = -1, torch.empty(0)

    def weight(self, shard: int) -> float:
        """Return the part of a step's samples that a shard holds."""
        begin, end = self.cuts[shard]
        return (end - begin) / self.batch_size

    def indices(self, step: int, shard: int) -> Tensor:
        """Return the samples of a shard; the rest of an epoch that fills no batch is left out."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if not self.shuffle:
            order = torch.arange(self.samples)
        elif self._order[0] == epoch:
            order = self._order[1]
        else:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "order", epoch))
            order = torch.randperm(self.samples, generator=generator)
            self._order = epoch, order
        begin, end = self.cuts[shard]
        return order[place * self.batch_size + begin : place * self.batch_size + end]

    def __getitem__(self, place: tuple[int, int]) -> Any:
        """Fetch a shard. Seeds the generators of this process first."""
        indices = self.indices(*place)
        if type(self.data) is TensorDataset and self._collate is None:
            return _named([tensor[indices] for tensor in self.data.tensors])
        seed_generators(seed_of(self.seed, "data", *place))
        numbers = indices.tolist()
        many = getattr(self.data, "__getitems__", None)
        samples = many(numbers) if many is not None else [self.data[i] for i in numbers]
        return _named((self._collate or default_collate)(samples))

    def digest(self, *numbers: int) -> int:
        """Return a number that is equal on members that hold the same samples of these numbers."""
        before = random_states()
        try:
            seed_generators(seed_of(self.seed, "digest", *numbers))
            samples = [self.data[number % self.samples] for number in numbers]
            batch = (self._collate or default_collate)(samples)
        finally:
            set_random_states(before)
        return seed_of([digest(x) for x in tensors_in(batch)])


class Loader:
    """Fetches shards, ahead of time in `workers` processes if there are any."""

    def __init__(self, shards: Shards, workers: int, last: int) -> None:
        self._shards = shards
        self._ahead = _Ahead(last)
        self._iterator: Iterator[Any] | None = None
        self._expected: Iterator[tuple[int, int]] = iter(())
        self._next: tuple[int, int] | None = None
        self._loader: DataLoader[Any] | None = None
        if workers:
            self._loader = DataLoader(
                shards,
                batch_size=None,
                sampler=self._ahead,
                num_workers=workers,
                collate_fn=_as_it_is,
                persistent_workers=True,
            )

    def expect(self, step: int, runs: Sequence[Run]) -> None:
        """Prepare for a step of these runs, and for the same ones in the steps after it."""
        numbers = [shard for begin, end in runs for shard in range(begin, end)]
        if self._loader is None or not numbers or self._next == (step, numbers[0]):
            return
        self._ahead.step, self._ahead.numbers = step, numbers
        self._expected, self._iterator = iter(self._ahead), iter(self._loader)
        self._next = next(self._expected, None)

    def fetch(self, step: int, shard: int) -> Any:
        """Return a shard's batch."""
        if self._iterator is not None and self._next == (step, shard):
            batch = next(self._iterator)
            self._next = next(self._expected, None)
        else:
            batch = self._shards[step, shard]
        return fresh(batch)


@dataclass
class _Ahead:
    """Says which shards will probably be needed, in order."""

    last: int
    step: int = 0
    numbers: Sequence[int] = ()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for step in range(self.step, self.last):
            for shard in self.numbers:
                yield step, shard


def _as_it_is(batch: Any) -> Any:
    return batch


def _named(batch: Any) -> Any:
    """Return a batch of two as inputs and targets."""
    is_plain = type(batch) in (list, tuple)
    return LabelledBatch(*batch) if is_plain and len(batch) == 2 else batch

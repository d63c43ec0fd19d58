"""`DataLoader`: torch's loader that also shuffles over ranks and tells samplers the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from unisono.comm import world
from unisono.data_parallel.data.dataset import Dataset, dataset_irecv, generator_of
from unisono.data_parallel.data.sampler import DistributedSampler
from unisono.expect import expect, refusal


class DataLoader:
    """Batches of this rank's rows, epoch after epoch.

    A `Dataset` is shuffled over ranks before every epoch but the first; with its `ishuffle` rows
    travel during one epoch and are used from the next. Iterating is then collective over its
    communicator. Any other torch dataset is iterated as it is. A `sampler` with `set_epoch` gets
    each epoch's number.

    Args:
        dataset: a `Dataset`, another torch dataset, or an object with `.larray`.
        batch_size: rows of a batch.
        num_workers: processes that prepare batches.
        collate_fn: makes a batch of a list of rows.
        pin_memory: copy batches into page-locked memory.
        drop_last: leave out a last batch that is not full.
        timeout: seconds to wait for a worker.
        worker_init_fn: called in each worker.
        shuffle: random order of this rank's rows in each epoch.
        sampler: gives the order instead.
        generator: of that order; default an own one, so the global generator is not touched.
        persistent_workers: keep workers between epochs that have the same rows.
        prefetch_factor: batches prepared in advance by each worker.

    >>> loader = DataLoader(Dataset(torch.arange(5)), batch_size=2, shuffle=False)
    >>> len(loader), [batch.tolist() for batch in loader]
    (3, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        *,
        shuffle: bool = True,
        sampler: Any = None,
        generator: torch.Generator | None = None,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        expect("shuffle", shuffle, bool)
        if not isinstance(dataset, torch.utils.data.Dataset):
            if not hasattr(dataset, "larray"):
                raise refusal(
                    TypeError,
                    f"DataLoader of {type(dataset).__name__}",
                    "not a dataset",
                    hint="DataLoader(Dataset(x)), where x holds this rank's rows",
                )
            dataset = Dataset(dataset)
        self.dataset: Any = dataset
        self.ishuffle: bool = getattr(dataset, "ishuffle", False)
        self.last_epoch = False
        self.epoch = 0
        self._first_iter = True
        can_shuffle = sampler is None and not isinstance(dataset, torch.utils.data.IterableDataset)
        if generator is None:
            ranks = dataset.communicator if isinstance(dataset, Dataset) else world()
            generator = generator_of("loader", getattr(dataset, "seed", 0), ranks.rank)
        self.DataLoader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle and can_shuffle and not getattr(dataset, "test_set", False),
            sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch: shuffle as the dataset asks, then yield its batches."""
        self.begin_epoch()
        return iter(self.DataLoader)

    def __len__(self) -> int:
        """Number of batches of an epoch on this rank."""
        return len(self.DataLoader)

    def go_to_epoch(self, epoch: int) -> None:
        """Bring the rows to where they are before this epoch begins. Collective, as iterating is.

        Rows that ranks pass on are passed on as in all epochs before; the way back is a new loader.
        """
        if not hasattr(self.dataset, "ishuffle"):
            self._first_iter = self._first_iter and epoch == self.epoch
            self.epoch = epoch
        elif epoch < self.epoch:
            raise refusal(
                ValueError,
                f"go_to_epoch({epoch})",
                f"{self.epoch} epochs were begun, and their shuffles are not undone",
                hint="make another loader",
            )
        while self.epoch < epoch:
            self.begin_epoch()

    def begin_epoch(self) -> None:
        """Shuffle as the dataset asks and tell the sampler the epoch; iterating does it, too."""
        first, self._first_iter = self._first_iter, False
        sampler, moves_rows = self.DataLoader.sampler, False
        if hasattr(self.dataset, "ishuffle"):
            moves_rows = not getattr(self.dataset, "test_set", False)
            if self.ishuffle:
                # Receive before the next start: the other order would overwrite what travels.
                dataset_irecv(self.dataset)
                if not self.last_epoch:
                    self.dataset.Ishuffle()
            elif not first:
                self.dataset.Shuffle()
        set_epoch = getattr(sampler, "set_epoch", None)
        # A sampler is built in the state of epoch 0.
        if set_epoch is not None and not first:
            set_epoch(self.epoch)
            moves_rows = moves_rows or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
        if moves_rows:
            # Workers that stayed hold the rows of the epoch in which they were started.
            self.DataLoader._iterator = None
        self.epoch += 1

"""`DataLoader`, and `DistributedSampler`: one random order of the rows of all ranks.

The loader is torch's, and also shuffles over ranks and tells samplers the epoch. The sampler moves
rows between ranks by one all-to-all; afterwards each rank reads its own memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.data_parallel.dataset import (
    Dataset,
    DistributedDataset,
    dataset_irecv,
    generator_of,
    home_of,
    local_rows,
)
from unisono.data_parallel.ranks import on_device
from unisono.errors import PartitionError
from unisono.expect import expect, expect_choice, refusal
from unisono.topology import decompose


class DistributedSampler(torch.utils.data.Sampler[int]):
    """Yields this rank's rows after bringing them into a random order over all ranks.

    With N rows in the whole array x and a seed, every rank makes the same
    `q = torch.randperm(N, generator=...)`, and holds `x[q]` in its place. The order depends on seed
    and epoch only, not on earlier shuffles. The constructor with `shuffle=True`, `set_seed` and
    `set_epoch` are collective over the dataset's communicator.

    Args:
        dataset: the `DistributedDataset` whose rows move.
        shuffle: shuffle now and in each epoch.
        seed: of the order; None: rank 0 draws one.
        shuffle_type: `"global"` over all ranks, `"local"` within each.
        correction: accepted for HeAT's sake; the order is always exact.
    """

    def __init__(
        self,
        dataset: DistributedDataset,
        shuffle: bool = False,
        seed: int | None = None,
        shuffle_type: str = "global",
        correction: bool = False,
    ) -> None:
        expect("dataset", dataset, DistributedDataset, "DistributedDataset(x)")
        expect("shuffle", shuffle, bool)
        expect("seed", seed, (int, type(None)))
        expect("correction", correction, bool)
        self.shuffle_type = expect_choice("shuffle_type", shuffle_type, ("global", "local"))
        self.dataset = dataset
        self.shuffle = shuffle
        self.correction = correction
        self.seed = seed
        self.epoch = 0
        self._order: Tensor | None = None
        """Row of the original array at each place; None before the first shuffle."""
        self._linked: list[DistributedSampler] = []
        if shuffle:
            self.seed = _agreed_seed(seed, dataset.communicator)
            self._shuffle()

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of this rank's rows, in memory order."""
        return iter(range(len(self.dataset)))

    def __len__(self) -> int:
        """Number of rows on this rank."""
        return len(self.dataset)

    def set_seed(self, value: int) -> None:
        """Shuffle by another seed, and from now on in each epoch. Collective."""
        expect("seed", value, int)
        for sampler in self._all_linked():
            sampler.seed, sampler.shuffle, sampler.epoch = value, True, 0
            sampler._shuffle()

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by `seed + epoch`, unless shuffling is off. Collective."""
        expect("epoch", epoch, int)
        for sampler in self._all_linked():
            sampler.epoch = epoch
            if sampler.shuffle:
                sampler._shuffle()

    def set_shuffle_type(self, shuffle_type: str) -> None:
        """Choose `"global"` or `"local"` for the next shuffles. Local."""
        expect_choice("shuffle_type", shuffle_type, ("global", "local"))
        for sampler in self._all_linked():
            sampler.shuffle_type = shuffle_type

    def link(self, sampler: DistributedSampler) -> None:
        """Let another sampler follow this one: same seeds, same order, now and later. Collective.

        Its array needs as many rows on each rank, so that data and labels stay in step.
        """
        expect("sampler", sampler, DistributedSampler, "link(DistributedSampler(dataset))")
        here, there = list(self.dataset.cuts), list(sampler.dataset.cuts)
        if here != there:
            problem = f"rows begin at {here} here and at {there} there"
            hint = "split both arrays alike"
            raise PartitionError.because("link of two samplers", problem, hint=hint)
        if sampler is self or sampler in self._linked:
            return
        self._linked.append(sampler)
        sampler.seed, sampler.epoch, sampler.shuffle = self.seed, self.epoch, self.shuffle
        sampler.shuffle_type = self.shuffle_type
        sampler._reorder(self._order)

    def unlink(self, sampler: DistributedSampler | None = None) -> None:
        """Let one sampler, or all, no longer follow this one. Local."""
        self._linked = [s for s in self._linked if sampler is not None and s is not sampler]

    def _all_linked(self) -> list[DistributedSampler]:
        """Return this sampler and all that follow it, each once."""
        samplers: list[DistributedSampler] = [self]
        for sampler in samplers:
            samplers += [s for s in sampler._linked if s not in samplers]
        return samplers

    def _shuffle(self) -> None:
        cuts = self.dataset.cuts
        if self.shuffle_type == "global":
            self._reorder(self._permutation(cuts[-1]))
            return
        order = torch.arange(cuts[-1]) if self._order is None else self._order
        # From sorted rows, so that an epoch's order does not depend on the one before.
        rows_by_rank = [order[a:b].sort().values for a, b in pairwise(cuts)]
        self._reorder(torch.cat([part[self._permutation(len(part))] for part in rows_by_rank]))

    def _permutation(self, n: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed or 0) + self.epoch)
        return torch.randperm(n, generator=generator)

    def _reorder(self, order: Tensor | None) -> None:
        """Bring rows into `order` of the original array; None: as they were."""
        target = torch.arange(self.dataset.cuts[-1]) if order is None else order
        places = target
        if self._order is not None:
            now_at = torch.empty_like(target)
            now_at[self._order] = torch.arange(len(target))
            places = now_at[target]
        elif order is None:
            return
        self.dataset.data = _reorder_rows(
            self.dataset.data, places, self.dataset.cuts, comm=self.dataset.communicator
        )
        self._order = order


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
        generator: of that order; by default of its own, so the global generator is not touched.
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
                hint = "DataLoader(Dataset(x)), where x holds this rank's rows"
                call = f"DataLoader of {type(dataset).__name__}"
                raise refusal(TypeError, call, "not a dataset", hint=hint)
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


def create_train_val_split(
    X: Any, y: Any, p: float = 0.95, seed: int | None = None, *, comm: object = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (X_train, y_train, X_val, y_val), this rank's rows of each. Collective over `comm`.

    Rows of all ranks are mixed by one seed; of its `n` rows each rank then takes `int(p * n)` for
    training. X and y stay in step and are not written to.

    Args:
        X: this rank's rows of the data: tensor, numpy array, or an object with `.larray`.
        y: this rank's rows of the labels, equally many.
        p: part for training, between 0 and 1.
        seed: of the mix; None: rank 0 draws one.
        comm: the ranks; default those of `X`, else the world.
    """
    rows, labels = local_rows(X, "create_train_val_split"), local_rows(y, "create_train_val_split")
    expect("p", p, (float, int))
    expect("seed", seed, (int, type(None)))
    if not 0 < p < 1:
        raise refusal(ValueError, f"p={p}", arithmetic=f"not 0 < {p} < 1", hint="p=0.95")
    home = home_of(X, comm)
    lengths = home.all_gather_ints([rows.shape[0], labels.shape[0]])
    for rank, (a, b) in enumerate(lengths):
        if a != b:
            problem = f"on rank {rank} X has {a} rows and y has {b}"
            hint = "give every row of X its label on the same rank"
            raise PartitionError.because("create_train_val_split(X, y)", problem, hint=hint)
    common = _agreed_seed(seed, home)
    cuts = decompose.bounds([n for n, _ in lengths])
    places = torch.randperm(cuts[-1], generator=torch.Generator().manual_seed(common))
    n_local = rows.shape[0]
    local = torch.randperm(n_local, generator=torch.Generator().manual_seed(common))
    n_train = int(p * n_local)
    mixed = [
        _reorder_rows(part, places, cuts, comm=home)[local.to(part.device)]
        for part in (rows, labels)
    ]
    return mixed[0][:n_train], mixed[1][:n_train], mixed[0][n_train:], mixed[1][n_train:]


def _reorder_rows(
    rows: Tensor, places: Tensor, cuts: Sequence[int], *, comm: Communicator
) -> Tensor:
    """Return this rank's rows of `x[places]`, where x is split over ranks. Collective over `comm`.

    Args:
        rows: local `[n_r, ...]`, rows `[cuts[r], cuts[r + 1])` of x. Unchanged.
        places: permutation `[N]` of the rows of x, the same on every rank.
        cuts: where each rank's rows begin, before and after.
        comm: the ranks.

    Returns:
        New tensor `[n_r, ...]`.
    """
    start, stop = cuts[comm.rank], cuts[comm.rank + 1]
    if comm.size == 1:
        return rows[places.to(rows.device)]
    # Local rows, in the order of their new places: those of one rank follow each other.
    targets = ((places >= start) & (places < stop)).nonzero().squeeze(1)
    ends = torch.searchsorted(targets, torch.tensor(cuts))
    outgoing = rows[(places[targets] - start).to(rows.device)]
    # New rows of this rank, by the rank that has them: each sends in ascending order of place.
    share = places[start:stop]
    by_source = [((share >= a) & (share < b)).nonzero().squeeze(1) for a, b in pairwise(cuts)]
    arrived = on_device(comm, rows.device).all_to_all(
        outgoing,
        send_sizes=ends.diff().tolist(),
        recv_sizes=[len(at) for at in by_source],
    )
    out = torch.empty_like(rows)
    out[torch.cat(by_source).to(rows.device)] = arrived
    return out


def _agreed_seed(seed: int | None, comm: Communicator) -> int:
    """Return `seed`, or one that rank 0 draws. Collective over `comm` if it is None."""
    if seed is not None:
        return seed
    return comm.all_gather_ints([secrets.randbits(32)])[0][0]

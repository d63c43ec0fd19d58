"""Rows of this rank: arrays that are split over ranks along their first dim, and datasets of them.

An array is a tensor, a numpy array, or an object with `.larray` (a HeAT array, say), which brings
its local tensor there and may tell its communicator (`.comm`) and the dim it is split along
(`.split`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.data
from torch import Tensor

from unisono.comm import Communicator, Pending
from unisono.data_parallel.ranks import communicator_of, on_device
from unisono.errors import PartitionError
from unisono.expect import expect, expect_int, is_integer, refusal
from unisono.topology import decompose

A = TypeVar("A", Tensor, np.ndarray)

Transforms = Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
Attributes = Sequence[Sequence[Any]]
"""Pairs: name of a tensor of the dataset, and of an object whose `.larray` follows it, or None."""


def local_rows(array: object, call: str) -> Tensor:
    """Return this rank's rows of `array` as a tensor over the same memory. Local.

    Raises:
        TypeError: not an array.
        PartitionError: split along another dim than the first, or without rows.
    """
    if isinstance(array, np.ndarray):
        rows: object = torch.from_numpy(array)
    elif isinstance(array, Tensor):
        rows = array
    else:
        rows = getattr(array, "larray", None)
    if not isinstance(rows, Tensor):
        hint = "a torch tensor, a numpy array, or an object whose .larray is the local one"
        raise refusal(TypeError, f"{call} of {type(array).__name__}", "not an array", hint=hint)
    split = 0 if isinstance(array, Tensor | np.ndarray) else getattr(array, "split", 0)
    if split != 0:
        problem = "rows have to be split over ranks"
        call = f"{call} of an array with split={split!r}"
        raise PartitionError.because(call, problem, hint="array.resplit(0)")
    if rows.dim() == 0:
        raise PartitionError.because(f"{call} of a scalar", "0 dims, so no rows")
    return rows.detach()


def home_of(array: object, comm: object) -> Communicator:
    """Return the communicator to use: the one given, else the array's own, else the world."""
    if comm is None and not isinstance(array, Tensor | np.ndarray):
        comm = getattr(array, "comm", None)
    return communicator_of(comm)


def shard(x: A, *, axis: int = 0, comm: object = None) -> A:
    """Return this rank's chunk of an array that every rank holds whole. Local.

    Chunks differ by at most one along `axis`, larger ones first. The result is a view.

    >>> shard(torch.arange(5)).tolist()
    [0, 1, 2, 3, 4]
    """
    expect("x", x, (Tensor, np.ndarray), "a tensor or a numpy array")
    if not is_integer(axis) or not -x.ndim <= axis < x.ndim:
        raise PartitionError.because(
            f"shard(axis={axis!r})", f"an array of {x.ndim} dims", hint="axis=0"
        )
    home = communicator_of(comm)
    index: list[Any] = [slice(None)] * x.ndim
    index[axis] = slice(*decompose.block(x.shape[axis], home.size, home.rank))
    return x[tuple(index)]


class RankRows(torch.utils.data.Dataset[Any]):
    """A torch dataset over the rows in `data`, each transformed when it is read.

    Args:
        array: this rank's rows.
        transforms: a callable, or several applied in order, for each row.
        comm: the ranks that hold the others; None: the array's own, else the world.
    """

    _left_behind: tuple[str, ...] = ("comm", "communicator")
    """Attributes that do not go to a loader's worker processes."""

    def __init__(self, array: Any, transforms: Transforms, comm: object) -> None:
        self.data = local_rows(array, type(self).__name__)
        self.transforms = transforms
        if not all(callable(step) for step in self._steps()):
            hint = "a callable or a list"
            raise refusal(TypeError, f"transforms={transforms!r}", "not callable", hint=hint)
        self.communicator = home_of(array, comm)
        self.comm = self.communicator if comm is None else comm

    def __len__(self) -> int:
        """Number of rows on this rank."""
        return self.data.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return row `index` of this rank, transformed."""
        row = self.data[index]
        for step in self._steps():
            row = step(row)
        return row

    def _steps(self) -> Sequence[Any]:
        steps = self.transforms
        return steps if isinstance(steps, list | tuple) else () if steps is None else (steps,)

    def __getstate__(self) -> dict[str, Any]:
        """A loader's worker process is not a rank, and needs the rows only."""
        return {**self.__dict__, **dict.fromkeys(self._left_behind)}


class Dataset(RankRows):
    """This rank's rows of an array, with shuffles over all ranks. Collective over `comm`.

    All ranks keep equally many rows, as many as the shortest shard has: `data` holds them. A
    subclass may add `targets` (rows in step with `data`); both are then shuffled alike.

    Args:
        array: this rank's rows: tensor, numpy array, or an object with `.larray`. Never written to.
        transforms: a callable, or several applied in order, for each row.
        ishuffle: let the loader exchange rows in the background of an epoch.
        test_set: never shuffled.
        comm: the ranks; default the array's own, else the world.
        seed: of the shuffles' own generator.

    >>> rows = Dataset(torch.arange(4.0), transforms=lambda row: row * 2)
    >>> len(rows), rows[3].item()
    (4, 6.0)
    """

    _left_behind = (*RankRows._left_behind, "exchange", "htdata")

    def __init__(
        self,
        array: Any,
        transforms: Transforms = None,
        ishuffle: bool = False,
        test_set: bool = False,
        *,
        comm: object = None,
        seed: int = 0,
    ) -> None:
        expect("ishuffle", ishuffle, bool)
        expect("test_set", test_set, bool)
        self.seed = expect_int("seed", seed, 0)
        super().__init__(array, transforms, comm)
        self.ishuffle = ishuffle
        self.test_set = test_set
        self.htdata = array
        shortest = min(n for (n,) in self.communicator.all_gather_ints([len(self.data)]))
        self._cut_slice = slice(0, shortest)
        self.lcl_half = shortest // 2
        self.data = self.data[self._cut_slice]
        self.shuffles = 0
        self.exchange: RingExchange | None = None

    def Shuffle(self) -> None:
        """Pass half of the rows on to the next rank and mix the rest. Collective over `comm`."""
        if not self.test_set:
            dataset_shuffle(self, self._attributes())

    def Ishuffle(self) -> None:
        """Start `Shuffle` in the background; `dataset_irecv` completes it. Collective."""
        if not self.test_set:
            dataset_ishuffle(self, self._attributes())

    def _attributes(self) -> Attributes:
        names = ["data", "targets"] if hasattr(self, "targets") else ["data"]
        return [[name, None] for name in names]


class DistributedDataset(RankRows):
    """This rank's rows of an array, of any number on each rank. Collective over `comm`.

    Args:
        array: this rank's rows: tensor, numpy array, or an object with `.larray`. Never written to.
        transforms: a callable, or several applied in order, for each row.
        comm: the ranks; default the array's own, else the world.
    """

    _left_behind = (*RankRows._left_behind, "array")

    def __init__(self, array: Any, transforms: Transforms = None, *, comm: object = None) -> None:
        super().__init__(array, transforms, comm)
        self.array = array
        self.cuts = decompose.bounds(self.communicator.block_lengths(self.data))
        """Where each rank's rows begin in the whole; one more entry than ranks."""


# Shuffles over ranks in a ring: half of the rows move on to the next rank, then all are mixed.
# `dataset_shuffle` does it at once; `dataset_ishuffle` starts it and `dataset_irecv` completes it,
# so that rows travel while the model trains. Tensors are replaced, never written to.


RingExchange = list[tuple[str, str | None, Pending[dict[int, Tensor]]]]
"""Rows under way to the next rank: attribute, who follows it, what the previous rank sends."""


def dataset_shuffle(dataset: Any, attrs: Attributes) -> None:
    """Shuffle attributes of a dataset over ranks, all alike. Collective over its communicator.

    Rows `[0, lcl_half)` go to the next rank, those of the previous one take their place, and one
    random permutation mixes the rows of every attribute. Globally no row is lost or doubled.

    Args:
        dataset: a `Dataset`, or anything with its `comm`, `lcl_half` and `_cut_slice`. Two
            attributes are left there: `exchange`, the rows under way, and `shuffles`, their number
            so far. It may have a `seed`, else it is 0.
        attrs: pairs `[name, other]`: the tensor `name` is replaced; `other` names an object whose
            `.larray` gets the same rows, or is None.
    """
    dataset_ishuffle(dataset, attrs)
    dataset_irecv(dataset)


def dataset_ishuffle(dataset: Any, attrs: Attributes) -> None:
    """Start `dataset_shuffle` and return; rows change only in `dataset_irecv`. Collective.

    An exchange that is still under way is completed first.
    """
    dataset_irecv(dataset)
    tensors = [(name, other, _rows_of(dataset, name)) for name, other in attrs]
    comm, half = communicator_of(dataset.comm), dataset.lcl_half
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    dataset.exchange = [
        (
            name,
            other,
            on_device(comm, rows.device).start.exchange({to: rows[:half]}, {source: rows[:half]}),
        )
        for name, other, rows in tensors
    ]


def dataset_irecv(dataset: Any) -> None:
    """Complete the exchange that `dataset_ishuffle` started; without one, do nothing."""
    under_way: RingExchange | None = getattr(dataset, "exchange", None)
    if under_way is None:
        return
    dataset.exchange = None
    comm = communicator_of(dataset.comm)
    source = (comm.rank - 1) % comm.size
    shuffles: int = getattr(dataset, "shuffles", 0)
    generator = generator_of(getattr(dataset, "seed", 0), shuffles, comm.rank)
    dataset.shuffles = shuffles + 1
    n_rows = dataset._cut_slice.stop
    order = torch.randperm(n_rows, generator=generator)
    for name, other, pending in under_way:
        rows = _rows_of(dataset, name)
        mixed = torch.cat([pending.wait()[source], rows[dataset.lcl_half :]])
        mixed = mixed[order.to(rows.device)]
        setattr(dataset, name, mixed)
        if other is not None:
            getattr(dataset, other).larray = mixed


def _rows_of(dataset: Any, name: str) -> Tensor:
    """Return the rows of an attribute that take part: as many as every rank has."""
    rows = getattr(dataset, name)
    needed = dataset._cut_slice.stop
    if not isinstance(rows, Tensor) or rows.dim() == 0 or rows.shape[0] < needed:
        raise PartitionError.because(
            f"shuffle of attribute {name!r}",
            f"{type(rows).__name__} of shape {list(getattr(rows, 'shape', ()))}",
            f"a tensor of at least {needed} rows is needed, as many as 'data' has",
        )
    return rows.detach()[:needed]


def generator_of(*key: int | str) -> torch.Generator:
    """Return a CPU generator whose stream depends on every part of the key.

    The global generators are never touched.
    """
    text = "/".join(map(str, key)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    return torch.Generator().manual_seed(number)

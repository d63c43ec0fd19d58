"""Arrays that are split over ranks along their first dim: tensors, numpy arrays, `.larray` objects.

Each rank holds its own rows. An object with `.larray` (a HeAT array, say) brings its local tensor
there, and may tell its communicator (`.comm`) and the dim it is split along (`.split`).
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.data_parallel.ranks import communicator_of
from unisono.errors import PartitionError, explain
from unisono.topology import decompose

__all__ = ["home_of", "local_rows", "shard"]

A = TypeVar("A", Tensor, np.ndarray)


def local_rows(array: object, asked: str) -> Tensor:
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
        raise TypeError(
            explain(
                f"{asked} of {type(array).__name__}",
                "no array",
                None,
                "a torch tensor, a numpy array, or an object whose .larray is the local tensor",
            )
        )
    split = 0 if isinstance(array, Tensor | np.ndarray) else getattr(array, "split", 0)
    if split != 0:
        raise PartitionError.because(
            f"{asked} of an array with split={split!r}",
            "rows have to be split over ranks",
            f"{split!r} != 0",
            "array.resplit(0)",
        )
    if rows.dim() == 0:
        raise PartitionError.because(f"{asked} of a scalar", "0 dims, so no rows")
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
    if not isinstance(x, Tensor | np.ndarray):
        raise TypeError(
            explain(f"shard of {type(x).__name__}", "no array", None, "a tensor or a numpy array")
        )
    if not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise PartitionError.because(
            f"shard(axis={axis!r})", f"an array of {x.ndim} dims", None, "axis=0"
        )
    home = communicator_of(comm)
    start, stop = decompose.block(x.shape[axis], home.size, home.rank)
    index: list[Any] = [slice(None)] * x.ndim
    index[axis] = slice(start, stop)
    return x[tuple(index)]

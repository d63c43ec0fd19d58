"""The sliver of HeAT's arrays that data-parallel programs touch: rows split over ranks, or whole.

Not on torch's DTensor: it cuts rows by the ceiling, where HeAT balances them, and needs a mesh even
for one rank. Everything HeAT's arrays do beyond this names itself in an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.mpi_style import get_comm, sanitize_comm
from unisono.data_parallel import shard
from unisono.errors import PartitionError

__all__ = ["DNDarray", "array", "resplit", "use_device"]


class DNDarray:
    """An array that every rank holds whole (`split=None`), or whose rows are split (`split=0`).

    Args:
        larray: this rank's part.
        gshape: shape of the whole.
        split: 0 or None.
        comm: the ranks.
    """

    def __init__(self, larray: Tensor, gshape: Sequence[int], split: int | None, comm: Any) -> None:
        self.larray = larray
        self.gshape = tuple(int(n) for n in gshape)
        self.split, self.comm = split, comm

    shape = property(lambda self: self.gshape, doc="Shape of the whole.")
    lshape = property(lambda self: tuple(self.larray.shape), doc="Shape of the own part.")
    dtype = property(lambda self: self.larray.dtype, doc="Type of the numbers.")
    device = property(lambda self: self.larray.device, doc="Where the own part lives.")
    ndim = property(lambda self: len(self.gshape), doc="Number of dims.")

    def __len__(self) -> int:
        return self.gshape[0]

    def numpy(self) -> np.ndarray:
        """Return the whole on every rank. Collective where rows are split."""
        return self.resplit(None).larray.detach().cpu().numpy()

    def resplit(self, axis: int | None = None) -> DNDarray:
        """Return the array in another layout: rows split (0), or whole (None). Collective."""
        _check_split(axis)
        larray = self.larray
        if axis is None and self.split == 0:
            larray = Communicator.of(self.comm).all_gather(larray.contiguous())
        elif axis == 0 and self.split is None:
            larray = shard(larray, comm=self.comm).clone()
        return DNDarray(larray, self.gshape, axis, self.comm)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"an array has no {name!r} here\n  HINT: x.larray is this rank's tensor, x.numpy() the "
            "whole; for more keep heat and pass x.larray"
        )

    def __repr__(self) -> str:
        return (
            f"DNDarray({self.gshape}, own part {self.lshape}, dtype={self.dtype}, "
            f"split={self.split})"
        )


def _check_split(split: object) -> None:
    if split not in (None, 0):
        raise PartitionError.because(
            f"split={split!r}", "rows are split here, or nothing", hint="split=0, or keep heat"
        )


def array(
    obj: Any,
    dtype: torch.dtype | None = None,
    *,
    split: int | None = None,
    is_split: int | None = None,
    comm: Any = None,
) -> DNDarray:
    """Return an array of numbers, nested lists, a tensor or another array.

    Args:
        obj: the whole, the same on all ranks; with `is_split` this rank's rows. An array of which
            each rank has its rows is gathered.
        dtype: type of the numbers; default that of `obj`.
        split: 0: this rank keeps its rows.
        is_split: 0: `obj` holds this rank's rows, of any number. Collective then.
        comm: the ranks; default the world.
    """
    _check_split(split)
    _check_split(is_split)
    if isinstance(obj, DNDarray):
        obj = (obj if is_split == 0 else obj.resplit(None)).larray
    tensor = torch.as_tensor(obj).detach().clone().to(dtype)
    ranks = get_comm() if comm is None else sanitize_comm(comm)
    if is_split == 0:
        rows = sum(Communicator.of(ranks).block_lengths(tensor))
        return DNDarray(tensor, (rows, *tensor.shape[1:]), 0, ranks)
    local = tensor if split is None else shard(tensor, comm=ranks).clone()
    return DNDarray(local, tensor.shape, split, ranks)


def use_device(device: object = None) -> None:
    """Do nothing: an array lives where its numbers are. Scripts call it for GPUs."""


def resplit(arr: DNDarray, axis: int | None = None) -> DNDarray:
    """Return an array in another layout. Collective."""
    return arr.resplit(axis)

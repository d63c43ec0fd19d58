"""Shuffles over ranks in a ring: half of the rows move on to the next rank, then all are mixed.

`dataset_shuffle` does it at once; `dataset_ishuffle` starts it and `dataset_irecv` completes it, so
that rows travel while the model trains. Tensors are replaced, never written to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.comm import Pending
from unisono.data_parallel.ranks import communicator_of, on_device
from unisono.errors import PartitionError

Attributes = Sequence[Sequence[str | None]]
"""Pairs: name of a tensor of the dataset, and of an object whose `.larray` follows it, or None."""


@dataclass(frozen=True)
class RingExchange:
    """Rows under way to the next rank."""

    attrs: Attributes
    arriving: list[Pending[dict[int, Tensor]]]
    """For each attribute, what the previous rank sends."""


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
    tensors = [_rows_of(dataset, name) for name, _ in attrs]
    comm, half = communicator_of(dataset.comm), dataset.lcl_half
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arriving = [
        on_device(comm, rows.device).start.exchange({to: rows[:half]}, {source: rows[:half]})
        for rows in tensors
    ]
    dataset.exchange = RingExchange(attrs, arriving)


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
    for (name, other), pending in zip(under_way.attrs, under_way.arriving, strict=True):
        rows = _rows_of(dataset, name)
        mixed = torch.cat([pending.wait()[source], rows[dataset.lcl_half :]])
        mixed = mixed[order.to(rows.device)]
        setattr(dataset, str(name), mixed)
        if other is not None:
            getattr(dataset, other).larray = mixed


def _rows_of(dataset: Any, name: str | None) -> Tensor:
    """Return the rows of an attribute that take part: as many as every rank has."""
    rows = getattr(dataset, name or "data")
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

"""How a whole tensor lies on the ranks: cut it into their parts, and join the parts again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.topology import Partition


@dataclass(frozen=True)
class Layout:
    """A pair of functions between a whole tensor and the part each rank holds."""

    split: Callable[[Tensor], Tensor]
    """Own part of a whole tensor."""
    join: Callable[[Tensor], Tensor]
    """Whole tensor from the parts, on every rank. Collective."""
    split_like: Callable[[Tensor, Tensor], Tensor] | None = None
    """Own part of a whole tensor, in the sizes in which a second one is spread. Collective."""

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Own part of a whole tensor that is spread as `like` is."""
        return self.split(whole) if self.split_like is None else self.split_like(whole, like)


def replicated() -> Layout:
    """Every rank holds the whole tensor."""
    return Layout(split=lambda whole: whole, join=lambda part: part)


def blocks(partition: Partition, comm: Communicator) -> Layout:
    """Rank r holds block r of a partition; a rank outside it holds an empty tensor.

    Args:
        partition: the grid of ranks; blocks need not be balanced if they are outputs.
        comm: all ranks, those outside the partition too.
    """

    def split(whole: Tensor) -> Tensor:
        if not partition.active:
            return whole.new_zeros(0)
        return whole[partition.local_slices(whole.shape)].contiguous()

    def split_like(whole: Tensor, like: Tensor) -> Tensor:
        shapes: list[tuple[int, ...]] = comm.all_gather_object(tuple(like.shape))
        if not partition.active:
            return whole.new_zeros(0)
        return whole[_slices_of(partition, shapes)].contiguous()

    def join(part: Tensor) -> Tensor:
        everybody: list[Tensor] = comm.all_gather_object(part.detach().cpu())
        return _assembled(partition, everybody, ()).to(part.device)

    return Layout(split=split, join=join, split_like=split_like)


def as_layout(given: Partition | Layout | None, comm: Communicator) -> Layout:
    """Turn what a user may give into a layout; None is replicated."""
    if given is None:
        return replicated()
    return blocks(given, comm) if isinstance(given, Partition) else given


def _assembled(partition: Partition, parts: Sequence[Tensor], index: tuple[int, ...]) -> Tensor:
    """Join the blocks whose grid index begins with `index`."""
    if len(index) == partition.dim:
        return parts[partition.rank_at(index)]
    along = partition.shape[len(index)]
    pieces = [_assembled(partition, parts, (*index, i)) for i in range(along)]
    return torch.cat(pieces, dim=len(index))


def _slices_of(partition: Partition, shapes: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    """Slices of the own block, from the sizes that the blocks really have."""
    index = partition.index
    assert index is not None
    slices: list[slice] = []
    for dim, place in enumerate(index):
        beside = [(*index[:dim], i, *index[dim + 1 :]) for i in range(partition.shape[dim])]
        sizes = [shapes[partition.rank_at(i)][dim] for i in beside]
        cuts = [0, *accumulate(sizes)]
        slices.append(slice(cuts[place], cuts[place + 1]))
    return tuple(slices)

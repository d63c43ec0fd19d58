"""Blocks handed over in shared memory: packed by their owner, read in place by who needs them.

For large moves between ranks of one host it saves the copies through a channel. There are two
halves, used in turn: nobody packs a half again before all have met once more, and whoever comes to
that meeting has read what it needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.operators.flight import Flight
from unisono.topology.overlap import Move

LEAST_BYTES = 1 << 18
"""Smaller blocks travel as messages."""
MOST_BYTES = 1 << 28
"""So do larger ones: the memory stays for as long as the plan."""


class Staging:
    """Memory that all ranks of a communicator see.

    Args:
        comm: the ranks.
        buffer: own shared buffer, of two halves.
        views: those of all ranks, as this process sees them.
    """

    def __init__(self, comm: Communicator, buffer: Tensor, views: Sequence[Tensor]) -> None:
        self.comm = comm
        self.nbytes = buffer.shape[1]
        self._buffer = buffer
        self._views = views
        self._turn = 0

    @classmethod
    def of(cls, comm: Communicator, nbytes: int) -> Staging | None:
        """Return room for `nbytes` a rank; None where there is no shared memory. Collective."""
        if comm.backend != "shm" or not LEAST_BYTES <= nbytes <= MOST_BYTES:
            return None
        try:
            buffer = comm.shared_buffer((2, nbytes), torch.uint8)
        except UnisonoError:  # refused on all ranks alike
            return None
        views = comm.shared_views(buffer)
        return None if views is None else cls(comm, buffer, views)

    def next_half(self) -> int:
        """Return which half the next call uses; called by all ranks in the same order."""
        self._turn ^= 1
        return self._turn

    def half(self, place: int, turn: int, dtype: torch.dtype) -> Tensor:
        """Return one half of a rank's memory as elements."""
        whole = self.nbytes // dtype.itemsize * dtype.itemsize
        return self._views[place][turn, :whole].view(dtype)


@dataclass(frozen=True)
class Stage:
    """A staging and where the blocks of other ranks lie in it."""

    staging: Staging
    places: Mapping[int, int]
    """Rank of the staging's communicator for each rank of the move."""
    starts: Mapping[int, int]
    """For each peer, the first element of its block for this rank."""
    starts_back: Mapping[int, int]
    """The same for the way back."""

    @property
    def adjoint(self) -> Stage:
        """The stage of the way back."""
        return replace(self, starts=self.starts_back, starts_back=self.starts)


class StagedFlight(Flight):
    """Blocks that lie ready for their readers."""

    __slots__ = ("_dtype", "_recvs", "_stage", "_turn")

    def __init__(
        self,
        stage: Stage,
        sends: Sequence[tuple[Move, Tensor]],
        recvs: Sequence[Move],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._stage, self._recvs, self._dtype = stage, recvs, dtype
        staging = stage.staging
        self._turn = staging.next_half()
        half = staging.half(staging.comm.rank, self._turn, dtype)
        start = 0
        for move, block in sorted(sends, key=lambda pair: pair[0].peer):
            half[start : start + move.numel].view(move.shape).copy_(block)
            start += move.numel

    def take(self) -> dict[int, Tensor]:
        """Meet, and return the blocks where they lie: to be read before the next call."""
        stage = self._stage
        stage.staging.comm.barrier()
        found: dict[int, Tensor] = {}
        for move in self._recvs:
            half = stage.staging.half(stage.places[move.peer], self._turn, self._dtype)
            start = stage.starts[move.peer]
            found[move.peer] = half[start : start + move.numel].view(move.shape)
        return found

    def drop(self) -> None:
        """Leave the blocks unread; ranks have met to agree on it."""


def starts_for(me: int, moves_of: Mapping[int, Sequence[Move]]) -> dict[int, int]:
    """Return where each rank packs its block for `me`: behind those for lower ranks."""
    return {
        rank: sum(move.numel for move in moves if move.peer < me)
        for rank, moves in moves_of.items()
    }

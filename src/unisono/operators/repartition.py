"""`repartition`: a tensor changes its layout over ranks. The adjoint is the way back.

Boxes travel as messages. Large ones between ranks of one host are handed over in shared memory
(`Staging`), packed by their owner and read in place by who needs them, which saves the copies
through a channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.comm.arguments import dense
from unisono.comm.perform import Pending
from unisono.errors import PartitionError, UnisonoError
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import check_call
from unisono.topology.halo import Box
from unisono.topology.overlap import Move, OverlapPlan

LEAST_BYTES = 1 << 18
"""Smaller blocks travel as messages."""
MOST_BYTES = 1 << 28
"""So do larger ones: the memory stays for as long as the plan."""


class Staging:
    """Memory that all ranks of a communicator see.

    There are two halves, used in turn: nobody packs a half again before all have met once more,
    and whoever comes to that meeting has read what it needed.

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

    def pack(self, x: Tensor, sends: Sequence[Move]) -> int:
        """Lay the boxes of `x` ready for their readers; return which half they lie in."""
        staging = self.staging
        turn = staging.next_half()
        half = staging.half(staging.comm.rank, turn, x.dtype)
        start = 0
        for move in sorted(sends, key=attrgetter("peer")):  # as `starts_for` counts
            half[start : start + move.numel].view(move.shape).copy_(x[_slices(move.box)])
            start += move.numel
        return turn

    def arrived(self, turn: int, recvs: Sequence[Move], dtype: torch.dtype) -> dict[int, Tensor]:
        """Meet, and return the boxes where they lie: to be read before the next call."""
        self.staging.comm.barrier()
        found: dict[int, Tensor] = {}
        for move in recvs:
            half, start = self.staging.half(self.places[move.peer], turn, dtype), self.starts
            first = start[move.peer]
            found[move.peer] = half[first : first + move.numel].view(move.shape)
        return found


def starts_for(me: int, moves_of: Mapping[int, Sequence[Move]]) -> dict[int, int]:
    """Return where each rank packs its block for `me`: behind those for lower ranks."""
    return {
        rank: sum(move.numel for move in moves if move.peer < me)
        for rank, moves in moves_of.items()
    }


@dataclass(frozen=True)
class RepartitionOnGroup:
    """An overlap plan, the ranks it is carried out on, and the shapes at both ends."""

    comm: Communicator
    overlap: OverlapPlan
    before: tuple[int, ...]
    """Shape of what goes in; without elements on a rank outside the source partition."""
    after: tuple[int, ...]
    """Shape of what comes out; likewise."""
    stage: Stage | None = field(default=None, compare=False)
    """Shared memory to hand blocks over in, instead of messages."""

    @property
    def adjoint(self) -> RepartitionOnGroup:
        """The plan of the way back."""
        stage = None if self.stage is None else self.stage.adjoint
        back = self.overlap.adjoint
        return RepartitionOnGroup(self.comm, back, self.after, self.before, stage=stage)


class Repartition(LinearMap):
    """Own block of one layout -> own block of another."""

    @staticmethod
    def kernel(x: Tensor, plan: RepartitionOnGroup) -> Tensor:
        """Return the block after."""
        overlap, stage = plan.overlap, plan.stage
        turn, pending = 0, None
        if stage is not None:
            turn = stage.pack(x, overlap.sends)
        else:
            pending = _post(x, plan)
        y = x.new_empty(plan.after)
        if overlap.local is not None:
            y[_slices(overlap.local.dest)] = x[_slices(overlap.local.source)]
        if stage is not None:
            received = stage.arrived(turn, overlap.recvs, x.dtype)
        else:
            received = {} if pending is None else pending.wait()
        for move in overlap.recvs:
            y[_slices(move.box)] = received[move.peer]
        return y


Repartition.adjoint = Repartition


def _post(x: Tensor, plan: RepartitionOnGroup) -> Pending[dict[int, Tensor]]:
    """Post one message for each box that leaves or comes."""
    sends = {move.peer: dense(x[_slices(move.box)]) for move in plan.overlap.sends}
    recvs = {move.peer: x.new_empty(move.shape) for move in plan.overlap.recvs}
    return plan.comm._post(sends, recvs)


def repartition(x: Tensor, plan: OverlapPlan, *, comm: Communicator | None = None) -> Tensor:
    """Return the own block of the destination layout.

    Called by all ranks of both partitions; only ranks whose blocks overlap talk to each other.
    Gradients take the way back, so `requires_grad` must be equal on all ranks of both partitions
    (on a rank without a source block: of its empty tensor), and every rank must use its result
    (an empty one too: `attach`).

    Args:
        x: own block of the source layout, `plan.source_shape`; on a rank outside of the source
            partition a tensor without elements, in the dtype of the data.
        plan: from `unisono.topology.overlap`; its ranks are those of `comm`.
        comm: the ranks, the root communicator of both partitions; default the world.

    Returns:
        `plan.dest_shape`; a tensor of shape `[0]` outside of the destination partition.
    """
    comm = world() if comm is None else comm
    check_call(x, comm, "repartition")
    if plan.rank != comm.rank:
        raise PartitionError.because(
            f"repartition on rank {comm.rank} of {comm.size}",
            f"the plan of rank {plan.rank}",
            None,
            f"make the plan with me={comm.rank}",
        )
    shape = tuple(x.shape)
    if plan.source_shape is None and x.numel():
        raise PartitionError.because(
            f"repartition of shape {list(shape)}",
            f"rank {comm.rank} is not in the source partition",
            f"{x.numel()} elements != 0",
            "x = torch.empty(0) there, in the dtype of the data",
        )
    if plan.source_shape is not None and shape != plan.source_shape:
        raise PartitionError.because(
            f"repartition of shape {list(shape)}",
            f"a plan for shape {list(plan.source_shape)} on rank {comm.rank}",
            None,
            "make the plan from the cuts of this tensor",
        )
    if plan.is_identity:
        return identity(x)
    after = (0,) if plan.dest_shape is None else plan.dest_shape
    return Repartition.apply(x, RepartitionOnGroup(comm, plan, shape, after))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)

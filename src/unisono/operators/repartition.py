"""`repartition`: a tensor changes its layout over ranks. The adjoint is the way back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.comm.arguments import check_tensor
from unisono.errors import PartitionError
from unisono.operators.flight import Flight
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import check_comm
from unisono.operators.staging import Stage, StagedFlight
from unisono.topology.halo_plan import Box
from unisono.topology.overlap import OverlapPlan


@dataclass(frozen=True)
class RepartitionOnGroup:
    """An overlap plan, the ranks it is carried out on, and the shapes at both ends."""

    comm: Communicator
    overlap: OverlapPlan
    before: tuple[int, ...]
    """Shape of what goes in; without elements on a rank outside the source partition."""
    after: tuple[int, ...]
    """Shape of what comes out; likewise."""
    flight: Flight | None = field(default=None, compare=False)
    """Messages that were started before, by `start_moves`."""
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
        """See `LinearMap`."""
        overlap = plan.overlap
        flight = plan.flight
        if flight is None:
            flight = start_moves(x, overlap, x.dtype, plan.comm, plan.stage)
        y = x.new_empty(plan.after)
        if overlap.local is not None:
            y[_slices(overlap.local.dest)] = x[_slices(overlap.local.source)]
        received = flight.take()
        for move in overlap.recvs:
            y[_slices(move.box)] = received[move.peer]
        return y


Repartition.adjoint = Repartition


def start_moves(
    x: Tensor | None,
    overlap: OverlapPlan,
    dtype: torch.dtype,
    comm: Communicator,
    stage: Stage | None = None,
) -> Flight:
    """Post the messages of a repartition; `Repartition` with this flight in its plan finishes it.

    Args:
        x: own block, or None to take part with zeros.
        overlap: who sends what.
        dtype: of the data.
        comm: the ranks.
        stage: shared memory to use instead of messages; then all ranks of it call this.
    """
    if stage is not None:
        blocks = [] if x is None else [(move, x[_slices(move.box)]) for move in overlap.sends]
        return StagedFlight(stage, blocks, overlap.recvs, dtype)
    if not overlap.sends and not overlap.recvs:
        return Flight()
    sends = {
        move.peer: torch.zeros(move.shape, dtype=dtype, device=comm.device)
        if x is None
        else x[_slices(move.box)]
        for move in overlap.sends
    }
    recvs = {move.peer: (move.shape, dtype) for move in overlap.recvs}
    return Flight(comm.start.exchange(sends, recvs))


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
    comm = world() if comm is None else check_comm(comm, "repartition")
    check_tensor(x, comm.device, "repartition")
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

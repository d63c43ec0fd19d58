"""`repartition`: a tensor changes its layout over ranks. The adjoint is the way back.

Each box that changes its owner is one message.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unisono.comm import Communicator, world
from unisono.errors import PartitionError
from unisono.operators.linear import LinearMap, identity, set_adjoint
from unisono.operators.plans import check_call
from unisono.topology.halo import Box
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

    @property
    def adjoint(self) -> RepartitionOnGroup:
        """The plan of the way back."""
        return RepartitionOnGroup(self.comm, self.overlap.adjoint, self.after, self.before)


class RepartitionMap(LinearMap):
    """Own block of one layout -> own block of another."""

    @staticmethod
    def kernel(x: Tensor, plan: RepartitionOnGroup) -> Tensor:
        """Return the block after: what stays is copied, the rest goes from slice to slice."""
        overlap = plan.overlap
        y = x.new_empty(plan.after)
        pending = plan.comm._post(
            {move.peer: x[_slices(move.box)] for move in overlap.sends},
            {move.peer: y[_slices(move.box)] for move in overlap.recvs},
        )
        if overlap.local is not None:
            y[_slices(overlap.local.dest)] = x[_slices(overlap.local.source)]
        pending.wait()
        return y


set_adjoint(RepartitionMap)


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
    return RepartitionMap.apply(x, RepartitionOnGroup(comm, plan, shape, after))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)

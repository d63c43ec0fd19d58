"""`halo_exchange` and `halo_add`: fill a window from the blocks under it, and send gradients home.

What goes where is in the `HaloPlan`, made by `unisono.topology.halo`; here it is carried out, with
one message for each pair of ranks that share points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.comm.arguments import check_tensor
from unisono.comm.pending import Pending
from unisono.errors import PartitionError
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import check_comm
from unisono.topology.halo_plan import Box, HaloPlan, Message, Piece


@dataclass(frozen=True)
class HaloOnGroup:
    """A halo plan and the ranks it is carried out on."""

    comm: Communicator
    halo: HaloPlan
    ranks: tuple[int, ...] | None
    """Rank of `comm` for each rank of the plan; None: they are the same."""
    fill: float
    """Constant outside the tensor; 0 everywhere but in the first forward."""

    @property
    def adjoint(self) -> HaloOnGroup:
        """The plan of the adjoint: constants have no derivative."""
        return self if self.fill == 0 else replace(self, fill=0.0)

    @property
    def tangent(self) -> HaloOnGroup:
        """The plan for a tangent, which has no constant either."""
        return self.adjoint

    def rank_of(self, place: int) -> int:
        """Return the rank of `comm` that has this rank in the plan."""
        return place if self.ranks is None else self.ranks[place]


class HaloExchange(LinearMap):
    """Own block -> own window: the points under it from their owners, the constant elsewhere."""

    @staticmethod
    def kernel(x: Tensor, plan: HaloOnGroup) -> Tensor:
        """See `LinearMap`."""
        halo = plan.halo
        pending = _start(
            plan,
            [(message, _packed(x, message)) for message in halo.sends],
            halo.recvs,
            x.dtype,
        )
        window = torch.empty(
            halo.window_shape, dtype=x.dtype, device=x.device, memory_format=_layout_of(x)
        )
        for dim, (left, right) in enumerate(halo.fills):
            window.narrow(dim, 0, left).fill_(plan.fill)
            window.narrow(dim, halo.window_shape[dim] - right, right).fill_(plan.fill)
        for piece in halo.local:
            _place(window, piece, x[_slices(piece.source)])
        for message, values in _arrived(plan, pending, halo.recvs):
            for piece, part in zip(message.pieces, values, strict=True):
                _place(window, piece, part)
        return window


class HaloAdd(LinearMap):
    """Own window -> own block: every point gets the sum of what stands for it in all windows."""

    adjoint = HaloExchange

    @staticmethod
    def kernel(x: Tensor, plan: HaloOnGroup) -> Tensor:
        """See `LinearMap`."""
        halo = plan.halo
        pending = _start(
            plan,
            [
                (message, torch.cat([_gathered(x, piece).reshape(-1) for piece in message.pieces]))
                for message in halo.recvs
            ],
            halo.sends,
            x.dtype,
        )
        starts_here = _may_start_here(halo)
        if starts_here:
            first = halo.local[0]
            total = _gathered(x, first).clone(memory_format=torch.contiguous_format)
            _add_local(total, x, halo.local[1:])
        else:
            total = x.new_zeros(halo.block_shape)
        added = starts_here
        for message, values in _arrived(plan, pending, halo.sends):
            if message.peer > halo.rank and not added:
                _add_local(total, x, halo.local)
                added = True
            for piece, part in zip(message.pieces, values, strict=True):
                total[_slices(piece.source)] += part
        if not added:
            _add_local(total, x, halo.local)
        return total


HaloExchange.adjoint = HaloAdd


def halo_exchange(
    x: Tensor,
    plan: HaloPlan,
    *,
    ranks: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return the own window: `plan.window_shape`, with the points of other ranks and the padding.

    Called by all ranks of the plan's partition; only ranks that share points talk to each other.
    Gradients of window points go back to the rank that owns the point and are added there, so
    `requires_grad` must be equal on all ranks, and every rank must use its result (an empty one
    too: `attach`).

    Args:
        x: own block, of shape `plan.block_shape`.
        plan: from `unisono.topology.halo.plan(...)`.
        ranks: rank of `comm` for each rank of the partition (`partition.ranks`); default: the same.
        comm: the ranks; default the world.
    """
    on_group = _on_group(x, plan, plan.block_shape, ranks, comm, plan.fill, "halo_exchange")
    if plan.is_identity:
        return identity(x)
    return HaloExchange.apply(x, on_group)


def halo_add(
    g: Tensor,
    plan: HaloPlan,
    *,
    ranks: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return the own block: for each point the sum over all windows that show it.

    The adjoint of `halo_exchange`; called as it is. Contributions are added in ascending rank
    order, so that results are the same bits in every run; what stands on padding is dropped.

    Args:
        g: own window, of shape `plan.window_shape`.
        plan: from `unisono.topology.halo.plan(...)`.
        ranks: rank of `comm` for each rank of the partition; default: the same.
        comm: the ranks; default the world.
    """
    on_group = _on_group(g, plan, plan.window_shape, ranks, comm, 0.0, "halo_add")
    if plan.is_identity:
        return identity(g)
    return HaloAdd.apply(g, on_group)


def _on_group(
    x: Tensor,
    plan: HaloPlan,
    shape: tuple[int, ...],
    ranks: Sequence[int] | None,
    comm: Communicator | None,
    fill: float,
    verb: str,
) -> HaloOnGroup:
    comm = world() if comm is None else check_comm(comm, verb)
    check_tensor(x, comm.device, verb)
    on_group = HaloOnGroup(comm, plan, None if ranks is None else tuple(ranks), fill)
    known = ranks is None or plan.rank < len(ranks)
    if not known or on_group.rank_of(plan.rank) != comm.rank:
        raise PartitionError.because(
            f"{verb} on rank {comm.rank} of {comm.size}",
            f"the plan of partition rank {plan.rank}"
            + ("" if ranks is None else f", partition ranks {list(ranks)}"),
            None,
            "make the plan with this rank's index: halo.plan(cuts, partition.index, ...)",
        )
    if tuple(x.shape) != shape:
        raise PartitionError.because(
            f"{verb} of shape {list(x.shape)}",
            f"a plan for shape {list(shape)} on rank {comm.rank}",
            None,
            "make the plan from the cuts of this tensor",
        )
    return on_group


def _start(
    plan: HaloOnGroup,
    sends: Sequence[tuple[Message, Tensor]],
    recvs: Sequence[Message],
    dtype: torch.dtype,
) -> Pending[dict[int, Tensor]] | None:
    """Post all messages at once; None when there are none."""
    if not sends and not recvs:
        return None
    return plan.comm.exchange(
        {plan.rank_of(message.peer): flat for message, flat in sends},
        {plan.rank_of(message.peer): ((message.numel,), dtype) for message in recvs},
        async_op=True,
    )


def _arrived(
    plan: HaloOnGroup, pending: Pending[dict[int, Tensor]] | None, recvs: Sequence[Message]
) -> list[tuple[Message, list[Tensor]]]:
    """Wait, and return each message with the values of its pieces, in ascending order of peers."""
    if pending is None:
        return []
    received = pending.wait()
    return [
        (
            message,
            [
                part.reshape(piece.shape)
                for piece, part in zip(
                    message.pieces,
                    received[plan.rank_of(message.peer)].split([p.numel for p in message.pieces]),
                    strict=True,
                )
            ],
        )
        for message in recvs
    ]


def _packed(x: Tensor, message: Message) -> Tensor:
    """Return the points of a message as one row."""
    parts = [x[_slices(piece.source)].reshape(-1) for piece in message.pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _place(window: Tensor, piece: Piece, values: Tensor) -> None:
    """Write a piece into the window, reversed or repeated as it says."""
    window[_slices(piece.dest)] = values.flip(piece.flips) if piece.flips else values


def _gathered(window: Tensor, piece: Piece) -> Tensor:
    """Return what stands for the points of a piece in the window, in the order of the points."""
    values = window[_slices(piece.dest)]
    if piece.repeats:
        values = values.sum(piece.repeats, keepdim=True, dtype=values.dtype)
    return values.flip(piece.flips) if piece.flips else values


def _add_local(total: Tensor, window: Tensor, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        total[_slices(piece.source)] += _gathered(window, piece)


def _may_start_here(halo: HaloPlan) -> bool:
    """Whether sums may begin with the own block instead of zeros, for the same bits.

    They run in ascending rank order; two terms may change places, three may not.
    """
    if not halo.local or halo.local[0].shape != halo.block_shape:
        return False
    lower = sum(len(message.pieces) for message in halo.sends if message.peer < halo.rank)
    return lower == 0 or (lower == 1 and len(halo.local) == 1)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _layout_of(x: Tensor) -> torch.memory_format:
    """Return channels-last for images and volumes that are stored so."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last):
        return last
    return torch.contiguous_format

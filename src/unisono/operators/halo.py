"""`halo_exchange` and `halo_add`: fill a window from the blocks under it, and send gradients home.

What goes where is in the `HaloPlan`, made by `unisono.topology.halo`; here it is carried out, with
one message for each pair of ranks that share points: post, place what is here, place what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.errors import PartitionError
from unisono.operators.linear import LinearMap, identity, set_adjoint
from unisono.operators.plans import check_call
from unisono.topology.halo import Box, HaloPiece, HaloPlan, Message

Cutout = tuple[tuple[int, int, int], ...]
"""A box in a tensor: dim, start and length where it is not all of a dim."""


@dataclass(frozen=True)
class HaloOnGroup:
    """A halo plan and the ranks it is carried out on."""

    comm: Communicator
    halo: HaloPlan
    ranks: tuple[int, ...] | None
    """Rank of `comm` for each rank of the plan; None: they are the same."""
    fill: float
    """Constant outside the tensor; 0 everywhere but in the first forward."""
    landed: dict[int, Tensor] | None = field(default=None, compare=False)
    """What has come from each rank before, by `exchanged`."""

    @property
    def adjoint(self) -> HaloOnGroup:
        """The plan of the adjoint, and that for a tangent: constants have no derivative."""
        if self.fill == 0 and self.landed is None:
            return self
        return replace(self, fill=0.0, landed=None)

    tangent = adjoint

    @cached_property
    def sends(self) -> tuple[tuple[int, tuple[Cutout, ...]], ...]:
        """Rank of `comm` for each message that goes out, and its pieces of the own block."""
        ranks, shape = self.ranks or range(self.comm.size), self.halo.block_shape
        return tuple(
            (ranks[message.peer], tuple(_cutout(piece.source, shape) for piece in message.pieces))
            for message in self.halo.sends
        )


class HaloExchangeMap(LinearMap):
    """Own block -> own window: the points under it from their owners, the constant elsewhere."""

    @staticmethod
    def kernel(x: Tensor, plan: HaloOnGroup) -> Tensor:
        """Return the window; what other ranks send lands in it."""
        if plan.landed is not None:
            return filled(x, plan, plan.landed)
        halo, ranks = plan.halo, plan.ranks or range(plan.comm.size)
        window, coming = _empty_window(x, halo), {}
        for message in halo.recvs:
            if not message.is_box:
                return filled(x, plan, exchanged(x, plan))
            coming[ranks[message.peer]] = window[message.pieces[0].dest_slices]
        pending = plan.comm._post(_outgoing(x, plan), coming)
        _place_own(window, x, plan)
        pending.wait()
        return window


class HaloAddMap(LinearMap):
    """Own window -> own block: every point gets the sum of what stands for it in all windows."""

    @staticmethod
    def kernel(x: Tensor, plan: HaloOnGroup) -> Tensor:
        """Return the block."""
        halo = plan.halo
        packed = [
            (message, _joined([_gathered(x, piece) for piece in message.pieces]))
            for message in halo.recvs
        ]
        ranks = plan.ranks or range(plan.comm.size)
        going = {ranks[message.peer]: block for message, block in packed}
        pending = plan.comm._post(going, _incoming(plan, halo.sends, x))
        starts_here = _may_start_here(halo)
        if starts_here:
            first = halo.local[0]
            total = _gathered(x, first).clone(memory_format=torch.contiguous_format)
            _add_local(total, x, halo.local[1:])
        else:
            total = x.new_zeros(halo.block_shape)
        added = starts_here
        for message, values in _arrived(plan, pending.wait(), halo.sends):
            if message.peer > halo.rank and not added:
                _add_local(total, x, halo.local)
                added = True
            for piece, part in zip(message.pieces, values, strict=True):
                total[piece.source_slices] += part
        if not added:
            _add_local(total, x, halo.local)
        return total


set_adjoint(HaloExchangeMap, HaloAddMap)


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
    return identity(x) if plan.is_identity else HaloExchangeMap.apply(x, on_group)


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
    return identity(g) if plan.is_identity else HaloAddMap.apply(g, on_group)


def _on_group(
    x: Tensor,
    plan: HaloPlan,
    shape: tuple[int, ...],
    ranks: Sequence[int] | None,
    comm: Communicator | None,
    fill: float,
    verb: str,
) -> HaloOnGroup:
    comm = world() if comm is None else comm
    check_call(x, comm, verb)
    places = range(comm.size) if ranks is None else ranks
    if plan.rank >= len(places) or places[plan.rank] != comm.rank:
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
    return HaloOnGroup(comm, plan, None if ranks is None else tuple(ranks), fill)


def filled(x: Tensor, plan: HaloOnGroup, received: dict[int, Tensor]) -> Tensor:
    """Return the window of the own block and what has arrived. Not recorded by autograd."""
    window = _empty_window(x, plan.halo)
    _place_own(window, x, plan)
    for message, values in _arrived(plan, received, plan.halo.recvs):
        for piece, part in zip(message.pieces, values, strict=True):
            _place(window, piece, part)
    return window


def _cutout(box: Box, shape: Sequence[int]) -> Cutout:
    return tuple(
        (dim, start, stop - start)
        for dim, ((start, stop), n) in enumerate(zip(box, shape, strict=True))
        if stop - start != n
    )


def exchanged(x: Tensor, plan: HaloOnGroup) -> dict[int, Tensor]:
    """Exchange the messages of a plan at once; return what comes from each rank, flat."""
    received = _incoming(plan, plan.halo.recvs, x)
    plan.comm._move(_outgoing(x, plan), received)
    return received


def _outgoing(x: Tensor, plan: HaloOnGroup) -> dict[int, Tensor]:
    """Return what goes to each rank: a slice of `x` where that is all."""
    messages: dict[int, Tensor] = {}
    for rank, pieces in plan.sends:
        parts: list[Tensor] = []
        for cutout in pieces:
            part = x
            for dim, start, length in cutout:
                part = part.narrow(dim, start, length)
            parts.append(part)
        messages[rank] = _joined(parts)
    return messages


def _incoming(plan: HaloOnGroup, recvs: Sequence[Message], like: Tensor) -> dict[int, Tensor]:
    """Return memory for messages, one row for each, of the dtype and on the device of `like`."""
    ranks, dtype, device = plan.ranks or range(plan.comm.size), like.dtype, like.device
    messages: dict[int, Tensor] = {}
    for message in recvs:
        messages[ranks[message.peer]] = torch.empty(message.numel, dtype=dtype, device=device)
    return messages


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return all values of a message in one row; of a single part, as it lies."""
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def _arrived(
    plan: HaloOnGroup, received: dict[int, Tensor], recvs: Sequence[Message]
) -> list[tuple[Message, list[Tensor]]]:
    """Return each message with the values of its pieces, in ascending order of peers."""
    ranks = plan.ranks or range(plan.comm.size)
    messages: list[tuple[Message, list[Tensor]]] = []
    for message in recvs:
        flat, start = received[ranks[message.peer]], 0
        values: list[Tensor] = []
        for piece in message.pieces:
            values.append(flat[start : start + piece.numel].view(piece.shape))
            start += piece.numel
        messages.append((message, values))
    return messages


def _place(window: Tensor, piece: HaloPiece, values: Tensor) -> None:
    """Write a piece into the window, reversed or repeated as it says."""
    window[piece.dest_slices] = values.flip(piece.flips) if piece.flips else values


def _gathered(window: Tensor, piece: HaloPiece) -> Tensor:
    """Return what stands for the points of a piece in the window, in the order of the points."""
    values = window[piece.dest_slices]
    if piece.repeats:
        values = values.sum(piece.repeats, keepdim=True, dtype=values.dtype)
    return values.flip(piece.flips) if piece.flips else values


def _empty_window(x: Tensor, halo: HaloPlan) -> Tensor:
    """Return memory for the window, laid out as `x` is."""
    form = torch.contiguous_format
    if not x.is_contiguous():
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        if last is not None and x.is_contiguous(memory_format=last):
            form = last
    return torch.empty(halo.window_shape, dtype=x.dtype, device=x.device, memory_format=form)


def _place_own(window: Tensor, x: Tensor, plan: HaloOnGroup) -> None:
    """Write the own points and the constant into the window."""
    halo = plan.halo
    for piece in halo.local:
        _place(window, piece, x[piece.source_slices])
    for dim, (left, right) in enumerate(halo.fills if halo.has_fill else ()):
        size = window.shape[dim]
        if left:
            window.narrow(dim, 0, left).fill_(plan.fill)
        if right:
            window.narrow(dim, size - right, right).fill_(plan.fill)


def _add_local(total: Tensor, window: Tensor, pieces: Sequence[HaloPiece]) -> None:
    for piece in pieces:
        total[piece.source_slices] += _gathered(window, piece)


def _may_start_here(halo: HaloPlan) -> bool:
    """Whether sums may begin with the own block instead of zeros, for the same bits.

    They run in ascending rank order; two terms may change places, three may not.
    """
    if not halo.local or halo.local[0].shape != halo.block_shape:
        return False
    lower = sum(len(message.pieces) for message in halo.sends if message.peer < halo.rank)
    return lower == 0 or (lower == 1 and len(halo.local) == 1)

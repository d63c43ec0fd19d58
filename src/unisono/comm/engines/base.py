"""What moves and adds bytes: the kernels of one group, on plain contiguous tensors.

Two engines need no transport: that of a group of one, and the one that moves tensors of a device
through host memory.

`Communicator` checks arguments, moves dims, counts and times; an `Engine` does the work. A few
kernels are enough for one; the others are built from them here, and an engine overrides what it
does better. Nothing here knows about autograd.
"""

# What an engine need not do is nothing here, not abstract.
# ruff: noqa: B027

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from unisono.comm.reductions import PLAIN_DTYPES
from unisono.errors import UnisonoError

Blocks = Sequence[Tensor]
"""One tensor per rank of the group; some may have no elements."""
Messages = Sequence[tuple[int, Tensor]]
"""Peers, and what goes to them or comes from them."""
Copies = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a device, and the host memory that stands for them."""


class How(TypedDict):
    """How a kernel is run: whether it may only be started, and until when."""

    async_op: bool
    timeout_s: float


class Ticket(Protocol):
    """A transfer under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when the transfer is complete on this rank, or raise."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        ...


class SourceTicket(Ticket, Protocol):
    """A receive from any rank."""

    @property
    def source(self) -> int:
        """Rank of the group that sent the message, once it is done."""
        ...


class Engine(ABC):
    """Kernels of one group of ranks.

    Contract of all methods: tensors are contiguous, detached and on the group's device, of the
    sizes every rank agreed on; `outs[q]` and `ins[q]` belong to rank `q` of the group and may have
    0 elements. A method returns None when the transfer is complete, else a `Ticket`; with
    `async_op=False` it may do either. Tensors must stay alive until then (the caller holds them).
    Sums are the same bits on all ranks; float16 and bfloat16 are added (and divided, for `mean`) in
    float32 and rounded once, except by the backends of accelerators (`stream.py`); `sum64` adds
    float32 in float64. `alike` is a number that all ranks must pass the same, such as the dim that
    was asked for; an engine whose ranks compare their calls anyway compares it too. Every wait ends
    within `timeout_s` with `RankTimeout`, or earlier with `RankFailed` if a peer is known to be
    dead.
    """

    rank: int
    """Own place in the group."""
    size: int
    """Number of ranks in the group."""
    backend: str
    """Name of the backend, as the chooser and traces spell it."""
    device_type: str = "cpu"
    """Kind of device whose memory it moves."""
    reduces: frozenset[torch.dtype] = PLAIN_DTYPES
    """Dtypes that it reduces as they are; others stand in for the rest (`reductions.encode`)."""
    has_tags: bool = True
    """Whether messages between two ranks are distinguished by their tags."""
    waited_ns: int | None = None
    """Time this rank has spent waiting for others in blocking calls so far; None: not known."""
    last_algorithm: str = "native"
    """How the latest call was done, for traces."""
    cause: BaseException | None = None
    """Why the group cannot be used any more."""

    @abstractmethod
    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        """Replace `x` on every rank by the reduction over all ranks."""

    @abstractmethod
    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        """Replace `x` on every rank by `x` of `src`."""

    @abstractmethod
    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> Ticket | None:
        """Fill `outs[q]` with `ins[r]` of rank `q`."""

    @abstractmethod
    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `out` of rank `r` with the reduction over ranks of `ins[r]`."""

    @abstractmethod
    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """Send to and receive from the listed peers at once; no order of calls can deadlock.

        Messages of one tag between two ranks arrive in the order in which they were posted.
        Neither list names this rank, and no tensor is empty. Slices are taken too, if `moves`.
        """

    def moves(self, x: Tensor) -> bool:
        """Whether `exchange` takes this slice, which is not contiguous, as it lies in memory."""
        return False

    @abstractmethod
    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        """Complete when every rank of the group has called it."""

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        """Replace `x` on `dst` by the reduction; elsewhere `x` may be used as scratch space."""
        return self.all_reduce_(x if self.rank == dst else x.clone(), op, **how)

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `outs[q]` with `x` of rank `q`."""
        return self.all_to_all(outs, [x] * self.size, **how)

    def all_gather_rows(
        self,
        out: Tensor,
        lengths: Sequence[int],
        x: Tensor,
        *,
        alike: int = 0,
        **how: Unpack[How],
    ) -> Ticket | None:
        """Fill the blocks of `lengths[q]` rows of `out` with `x` of rank `q`."""
        return self.all_gather(out.split_with_sizes(lengths), x, alike=alike, **how)

    def gather(self, outs: Blocks | None, x: Tensor, dst: int, **how: Unpack[How]) -> Ticket | None:
        """Fill `outs[q]` of `dst` with `x` of rank `q`; `outs` is None on the other ranks."""
        nothing = x.new_empty(0)
        ins = [x if peer == dst else nothing for peer in range(self.size)]
        received = [nothing] * self.size if outs is None else outs
        return self.swap_blocks("gather", received, ins, dst, **how)

    def scatter(
        self, out: Tensor, ins: Blocks | None, src: int, **how: Unpack[How]
    ) -> Ticket | None:
        """Fill `out` of rank `r` with `ins[r]` of `src`; `ins` is None on the other ranks."""
        nothing = out.new_empty(0)
        outs = [out if peer == src else nothing for peer in range(self.size)]
        sent = [nothing] * self.size if ins is None else ins
        return self.swap_blocks("scatter", outs, sent, src, **how)

    def swap_blocks(
        self, verb: str, outs: Blocks, ins: Blocks, root: int, **how: Unpack[How]
    ) -> Ticket | None:
        """Do `all_to_all` for another verb, which an engine that compares calls compares."""
        return self.all_to_all(outs, ins, **how)

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """Return the tuples of all ranks, in rank order; all have the same length. Blocking."""
        row = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        rows = row.new_empty(self.size, len(row))
        ticket = self.all_gather(rows.unbind(), row, async_op=False, timeout_s=timeout_s)
        if ticket is not None:
            ticket.wait(timeout_s)
        return [tuple(row) for row in rows.tolist()]

    @property
    def host(self) -> Engine:
        """The engine of the same ranks for host memory: objects, and what ranks agree on."""
        return self

    def connect(self, timeout_s: float) -> None:
        """Have all ranks of a new group come together, where that is not done yet. Collective."""

    def shared_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout_s: float
    ) -> Tensor:
        """Return zeros on which collectives of this group run without copies, where it can.

        Collective over the group. Plain memory here; engines with shared memory override it.
        """
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")

    # -- life: a group of torch's own backends is torch's to end -----------------------------------

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        """Start to receive the first message with `tag`, from any rank."""
        raise UnisonoError(f"a receive of {list(x.shape)}, tag {tag}: there is no other rank")

    def check_usable(self) -> None:
        """Raise if the group is broken."""

    def unusable(self) -> UnisonoError:
        """Return the error of a call on a group that has broken."""
        return UnisonoError(f"this {self.backend} group cannot be used any more: {self.cause}")

    def fail(self, error: BaseException) -> None:
        """Break the group for this rank and tell the others why."""

    def cancel(self, why: str) -> None:
        """End the wait of the call under way, from another thread."""

    def abandon_after_fork(self) -> None:
        """Make the group unusable in a forked child; the other ranks learn nothing of it."""

    def close(self) -> None:
        """Leave the group. Safe to repeat."""


class SelfEngine(Engine):
    """A group of one rank is a group: every collective is a copy or nothing."""

    rank = 0
    size = 1
    backend = "self"

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> None:
        """Leave `x` as it is."""

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> None:
        """Leave `x` as it is."""

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> None:
        """Copy the one block, whose shapes may differ in form as between ranks."""
        outs[0].view(-1).copy_(ins[0].view(-1))

    def reduce_scatter(self, out: Tensor, ins: Blocks, op: str, **how: object) -> None:
        """Copy the one block."""
        out.view(-1).copy_(ins[0].view(-1))

    def exchange(self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]) -> None:
        """Do nothing: there is no other rank."""

    def barrier(self, **how: Unpack[How]) -> None:
        """Do nothing."""

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """Return the own tuple."""
        return [tuple(values)]


class StagedTicket:
    """A transfer of host memory under way, and where its results belong.

    Args:
        ticket: that of the host's engine.
        copies: what is to be copied back.
    """

    def __init__(self, ticket: Ticket, copies: Copies) -> None:
        self._ticket = ticket
        self._copies = list(copies)

    def wait(self, timeout_s: float) -> None:
        """Wait on the host, then copy the results to the device."""
        self._ticket.wait(timeout_s)
        while self._copies:
            x, copy = self._copies.pop()
            x.copy_(copy)

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._ticket.done()

    @property
    def source(self) -> int:
        """Rank that sent the message, of a receive from any rank."""
        return self._ticket.source  # type: ignore[attr-defined]


class StagedEngine(Engine):
    """Kernels of a group on tensors of a device.

    Args:
        host: the group's engine for host memory.
    """

    def __init__(self, host: Engine) -> None:
        self._host = host
        self.rank, self.size = host.rank, host.size
        self.backend, self.reduces, self.has_tags = host.backend, host.reduces, host.has_tags

    @property
    def host(self) -> Engine:
        """The group's engine for host memory."""
        return self._host

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        copy = x.cpu()
        return self._copied_back(self._host.all_reduce_(copy, op, **how), [(x, copy)])

    def reduce_(self, x: Tensor, dst: int, op: str, **how: Unpack[How]) -> Ticket | None:
        copy = x.cpu()
        return self._copied_back(self._host.reduce_(copy, dst, op, **how), [(x, copy)])

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        copy = x.cpu()
        copies = [] if self.rank == src else [(x, copy)]
        return self._copied_back(self._host.broadcast_(copy, src, **how), copies)

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> Ticket | None:
        return self.swap_blocks("all_to_all", outs, ins, -1, **how)

    def swap_blocks(
        self, verb: str, outs: Blocks, ins: Blocks, root: int, **how: Unpack[How]
    ) -> Ticket | None:
        room = [_room(out) for out in outs]
        ticket = self._host.swap_blocks(verb, room, _on_host(ins), root, **how)
        return self._copied_back(ticket, list(zip(outs, room, strict=True)))

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        room = _room(out)
        ticket = self._host.reduce_scatter(room, _on_host(ins), op, alike=alike, **how)
        return self._copied_back(ticket, [(out, room)])

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        room = [_room(out) for out in outs]
        ticket = self._host.all_gather(room, x.cpu(), alike=alike, **how)
        return self._copied_back(ticket, list(zip(outs, room, strict=True)))

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        copies = [(x, _room(x)) for _, x in recvs]
        going = [(dst, x.cpu()) for dst, x in sends]
        coming = [(src, room) for (src, _), (_, room) in zip(recvs, copies, strict=True)]
        return self._copied_back(self._host.exchange(going, coming, tag, **how), copies)

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        room = _room(x)
        return StagedTicket(self._host.receive_any(room, tag), [(x, room)])

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        return self._host.barrier(**how)

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """See `Engine`."""
        return self._host.all_gather_ints(values, timeout_s=timeout_s)

    def _copied_back(self, ticket: Ticket | None, copies: Copies) -> Ticket | None:
        self.last_algorithm = f"{self._host.last_algorithm} (staged)"
        if ticket is not None:
            return StagedTicket(ticket, copies)
        for x, copy in copies:
            x.copy_(copy)
        return None


def _room(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _on_host(blocks: Blocks) -> list[Tensor]:
    """Return copies of blocks; one that is listed several times is copied once."""
    copies = {id(block): block for block in blocks}
    copies = {key: block.cpu() for key, block in copies.items()}
    return [copies[id(block)] for block in blocks]

"""Kernels for tensors of a device whose group moves host memory only: through copies there.

For devices without a collective backend (mps), and for tensors of any device in a shm or MPI group.
The host waits for the device before it sends, and what arrives is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from unisono.comm.engines.base import Blocks, Engine, How, Messages, SourceTicket, Ticket

Copies = Sequence[tuple[Tensor, Tensor]]
"""Tensors of a device, and the host memory that stands for them."""


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

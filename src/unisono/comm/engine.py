"""What a backend must be able to do: the kernels of one group, on plain contiguous tensors.

`Communicator` checks arguments, moves dims, counts and times; an `Engine` moves and adds bytes.
`TorchEngine` serves gloo and nccl through torch.distributed; our own transports
bring their own (`process_group.unisono_engine`). Nothing here knows about autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

REDUCE_OPS: tuple[str, ...] = ("sum", "product", "min", "max", "and", "or", "xor", "sum64")
"""Reductions an engine knows. `mean` is a sum and a division, done above."""


PLAIN_DTYPES: frozenset[torch.dtype] = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""Dtypes that every engine reduces; none of them can be a lazy conjugate."""


class Ticket(Protocol):
    """A transfer under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when the transfer is complete on this rank, or raise."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        ...


class Engine(ABC):
    """Kernels of one group of ranks.

    Contract of all methods: tensors are contiguous, detached and on the group's device, of the
    sizes every rank agreed on; `outs[q]` and `ins[q]` belong to rank `q` of the group and may have
    0 elements. A method returns None when the transfer is complete, else a `Ticket`; with
    `async_op=False` it may do either. Tensors must stay alive until then (the caller holds them).
    Sums are the same bits on all ranks; float16 and bfloat16 are added in float32 and rounded once;
    `sum64` adds float32 in float64. `alike` is a number that all ranks must pass the same, such as
    the dim that was asked for; an engine whose ranks compare their calls anyway compares it too.
    Every wait ends within `timeout_s` with `RankTimeout`, or
    earlier with `RankFailed` if a peer is known to be dead.
    """

    rank: int
    """Own place in the group."""
    size: int
    """Number of ranks in the group."""
    backend: str
    """Name of the backend, as the chooser and traces spell it."""
    reduces: frozenset[torch.dtype] = PLAIN_DTYPES
    """Dtypes that it reduces as they are; others stand in for the rest (`reductions.encode`)."""
    knows_mean: bool = False
    """Whether `all_reduce_` takes `mean` too, at no extra pass over the tensor."""
    waited_ns: int | None = None
    """Time this rank has spent waiting for others in blocking calls so far; None: not known."""
    last_algorithm: str = "native"
    """How the latest call was done, for traces."""

    @abstractmethod
    def all_reduce_(self, x: Tensor, op: str, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """Replace `x` on every rank by the reduction over all ranks."""

    @abstractmethod
    def reduce_(
        self, x: Tensor, dst: int, op: str, *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """Replace `x` on `dst` by the reduction; elsewhere `x` may be used as scratch space."""

    @abstractmethod
    def broadcast_(self, x: Tensor, src: int, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """Replace `x` on every rank by `x` of `src`."""

    @abstractmethod
    def all_gather(
        self, outs: Sequence[Tensor], x: Tensor, *, alike: int = 0, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """Fill `outs[q]` with `x` of rank `q`."""

    @abstractmethod
    def reduce_scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor],
        op: str,
        *,
        alike: int = 0,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """Fill `out` of rank `r` with the reduction over ranks of `ins[r]`."""

    @abstractmethod
    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, async_op: bool, timeout_s: float
    ) -> Ticket | None:
        """Fill `outs[q]` with `ins[r]` of rank `q`."""

    @abstractmethod
    def gather(
        self,
        outs: Sequence[Tensor] | None,
        x: Tensor,
        dst: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """Fill `outs[q]` of `dst` with `x` of rank `q`; `outs` is None on the other ranks."""

    @abstractmethod
    def scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor] | None,
        src: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """Fill `out` of rank `r` with `ins[r]` of `src`; `ins` is None on the other ranks."""

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> Ticket | None:
        """Send to and receive from the listed peers at once; no order of calls can deadlock.

        Messages of one tag between two ranks arrive in the order in which they were posted.
        Neither list names this rank, and no tensor is empty.
        """

    @abstractmethod
    def barrier(self, *, async_op: bool, timeout_s: float) -> Ticket | None:
        """Complete when every rank of the group has called it."""

    @abstractmethod
    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """Return the tuples of all ranks, in rank order; all have the same length. Blocking."""

    def shared_buffer(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> Tensor:
        """Return zeros on which collectives of this group run without copies, where it can.

        Collective over the group. Plain memory here; transports with shared memory override it.
        """
        return torch.zeros(tuple(shape), dtype=dtype)

    def shared_views(self, buffer: Tensor) -> list[Tensor] | None:  # noqa: ARG002
        """Return every rank's tensor of a `shared_buffer`; None where memory is not shared."""
        return None

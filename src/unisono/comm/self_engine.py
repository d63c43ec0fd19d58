"""The kernels of a group of one rank: copies, no process group needed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.comm.engine import Engine


class SelfEngine(Engine):
    """A world of one rank is a world: every collective is a copy or nothing."""

    rank = 0
    size = 1
    backend = "self"

    def all_reduce_(self, x: Tensor, op: str, *, async_op: bool, timeout_s: float) -> None:
        """See `Engine`."""

    def reduce_(self, x: Tensor, dst: int, op: str, *, async_op: bool, timeout_s: float) -> None:
        """See `Engine`."""

    def broadcast_(self, x: Tensor, src: int, *, async_op: bool, timeout_s: float) -> None:
        """See `Engine`."""

    def all_gather(
        self, outs: Sequence[Tensor], x: Tensor, *, alike: int = 0, async_op: bool, timeout_s: float
    ) -> None:
        """See `Engine`."""
        outs[0].copy_(x)

    def reduce_scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor],
        op: str,
        *,
        alike: int = 0,
        async_op: bool,
        timeout_s: float,
    ) -> None:
        """See `Engine`."""
        out.copy_(ins[0])

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, async_op: bool, timeout_s: float
    ) -> None:
        """See `Engine`."""
        outs[0].copy_(ins[0])

    def gather(
        self,
        outs: Sequence[Tensor] | None,
        x: Tensor,
        dst: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> None:
        """See `Engine`."""
        if outs is not None:
            outs[0].copy_(x)

    def scatter(
        self,
        out: Tensor,
        ins: Sequence[Tensor] | None,
        src: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> None:
        """See `Engine`."""
        if ins is not None:
            out.copy_(ins[0])

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
        *,
        async_op: bool,
        timeout_s: float,
    ) -> None:
        """See `Engine`; there is nobody to exchange with."""

    def barrier(self, *, async_op: bool, timeout_s: float) -> None:
        """See `Engine`."""

    def all_gather_ints(self, values: Sequence[int], *, timeout_s: float) -> list[tuple[int, ...]]:
        """See `Engine`."""
        return [tuple(values)]

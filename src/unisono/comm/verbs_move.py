"""The verbs that copy blocks between ranks: broadcast, gathers, scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from unisono.comm.arguments import (
    check_dim,
    check_rank,
    check_sizes,
    check_target,
    check_tensor,
)
from unisono.comm.calling import Like, contiguous, detached, rows_back, rows_first
from unisono.comm.headers import describe_block
from unisono.comm.pending import Pending
from unisono.comm.verbs_all_to_all import AllToAllVerb
from unisono.errors import UnisonoError


class MoveVerbs(AllToAllVerb):
    """Copies of blocks between the ranks of a communicator."""

    @overload
    def broadcast(
        self,
        x: Tensor | None,
        src: int = 0,
        *,
        like: Like | None = None,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def broadcast(
        self,
        x: Tensor | None,
        src: int = 0,
        *,
        like: Like | None = None,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def broadcast(
        self,
        x: Tensor | None,
        src: int = 0,
        *,
        like: Like | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Return the tensor of rank `src` on every rank. Collective over the communicator.

        Receivers pass a tensor of the same shape and dtype, or None with `like=(shape, dtype)`.
        """
        check_rank(src, self.size, "src", "broadcast")
        if x is not None:
            check_tensor(x, self.device, "broadcast")
        if self.rank == src:
            if x is None:
                raise UnisonoError.because(
                    "broadcast(None)", f"rank {src} is the source", None, "pass the tensor there"
                )
            out = detached(x).clone(memory_format=torch.contiguous_format)
        else:
            out = self._empty(x if x is not None else like, "broadcast")
        return self._broadcast_into(out, out, src, async_op, timeout_s)

    @overload
    def broadcast_(
        self,
        x: Tensor,
        src: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def broadcast_(
        self,
        x: Tensor,
        src: int = 0,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def broadcast_(
        self,
        x: Tensor,
        src: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Replace `x` on every rank by the tensor of rank `src`; returns `x`."""
        check_rank(src, self.size, "src", "broadcast_")
        check_target(x, self.device, "broadcast_")
        return self._broadcast_into(x, contiguous(detached(x)), src, async_op, timeout_s)

    def _broadcast_into(
        self, out: Tensor, work: Tensor, src: int, async_op: bool, timeout_s: float | None
    ) -> Tensor | Pending[Tensor]:
        call = self._begin("broadcast", out, root=src, async_op=async_op, timeout_s=timeout_s)
        nbytes = work.numel() * work.element_size()
        call.sent, call.received = (nbytes, 0) if self.rank == src else (0, nbytes)
        deadline = self._deadline(timeout_s)

        def finish() -> Tensor:
            if work.data_ptr() != out.data_ptr() and self.rank != src:
                out.detach().copy_(work)
            return out

        return self._run(
            call,
            lambda: self._engine.broadcast_(work, src, async_op=async_op, timeout_s=deadline),
            finish,
            async_op,
            deadline,
        )

    @overload
    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Return the blocks of all ranks joined along `dim`, on every rank.

        Collective over the communicator. Blocks may differ along `dim` and may be empty there;
        `sizes` are their W lengths, learned by one small exchange when None.
        """
        check_tensor(x, self.device, "all_gather")
        dim = check_dim(dim, x, "all_gather")
        rows = rows_first(x, dim)
        blocks_of = self._lengths(rows, dim, sizes, "all_gather", timeout_s)
        out = rows.new_empty((sum(blocks_of), *rows.shape[1:]))
        call = self._begin(
            "all_gather", x, dim=dim, sizes=blocks_of, async_op=async_op, timeout_s=timeout_s
        )
        call.sent = rows.numel() * rows.element_size()
        call.received = out.numel() * out.element_size() - call.sent
        deadline = self._deadline(timeout_s)
        return self._run(
            call,
            lambda: self._engine.all_gather(
                out.split_with_sizes(blocks_of),
                rows,
                alike=dim,
                async_op=async_op,
                timeout_s=deadline,
            ),
            lambda: rows_back(out, dim),
            async_op,
            deadline,
        )

    @overload
    def gather(
        self,
        x: Tensor,
        dst: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor | None: ...
    @overload
    def gather(
        self,
        x: Tensor,
        dst: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor | None]: ...
    def gather(
        self,
        x: Tensor,
        dst: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor | None] | None:
        """Return the blocks of all ranks joined along `dim` on rank `dst`, None on the others.

        Collective over the communicator; sizes as in `all_gather`.
        """
        check_tensor(x, self.device, "gather")
        check_rank(dst, self.size, "dst", "gather")
        dim = check_dim(dim, x, "gather")
        rows = rows_first(x, dim)
        blocks_of = self._lengths(rows, dim, sizes, "gather", timeout_s)
        out = rows.new_empty((sum(blocks_of), *rows.shape[1:])) if self.rank == dst else None
        call = self._begin(
            "gather",
            x,
            root=dst,
            dim=dim,
            sizes=blocks_of,
            async_op=async_op,
            timeout_s=timeout_s,
        )
        call.sent = rows.numel() * rows.element_size()
        call.received = 0 if out is None else out.numel() * out.element_size()
        deadline = self._deadline(timeout_s)
        return self._run(
            call,
            lambda: self._engine.gather(
                None if out is None else out.split_with_sizes(blocks_of),
                rows,
                dst,
                async_op=async_op,
                timeout_s=deadline,
            ),
            lambda: None if out is None else rows_back(out, dim),
            async_op,
            deadline,
        )

    @overload
    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        like: Like | None = None,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        like: Like | None = None,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        like: Like | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Return this rank's block along `dim` of the tensor of rank `src`.

        Collective over the communicator. Only `src` needs a tensor; the others pass None. `sizes`
        (on `src`) are the W block lengths along `dim`, balanced when None. With `sizes` and `like`
        (the own block: a tensor like it, or its shape and dtype) on every rank, nothing has to be
        told beforehand.
        """
        check_rank(src, self.size, "src", "scatter")
        refused: UnisonoError | None = None
        rows: Tensor | None = None
        blocks_of: tuple[int, ...] = (0,) * self.size
        if self.rank == src:
            try:
                if x is None:
                    raise UnisonoError.because(
                        "scatter(None)", f"rank {src} is the source", None, "pass the tensor there"
                    )
                check_tensor(x, self.device, "scatter")
                dim = check_dim(dim, x, "scatter")
                rows = rows_first(x, dim)
                blocks_of = self._block_sizes(sizes, rows.shape[0], "scatter")
            except UnisonoError as error:
                refused = error
        deadline = self._deadline(timeout_s)
        if like is not None and sizes is not None:
            if refused is not None:
                raise refused
            block = rows_first(self._empty(like, "scatter"), dim)
            blocks_of = check_sizes(sizes, self.size, "scatter")
            shape, dtype = tuple(block.shape), block.dtype
        else:
            with self._reporting("scatter", src, deadline):
                shape, dtype, blocks_of, dim = describe_block(
                    self._engine, src, rows, blocks_of, dim, refused, deadline
                )
        call = self._begin(
            "scatter",
            x,
            root=src,
            dim=dim,
            sizes=blocks_of,
            async_op=async_op,
            timeout_s=timeout_s,
        )
        out = torch.empty((blocks_of[self.rank], *shape[1:]), dtype=dtype, device=self.device)
        call.received = out.numel() * out.element_size()
        return self._run(
            call,
            lambda: self._engine.scatter(
                out,
                None if rows is None else rows.split_with_sizes(blocks_of),
                src,
                async_op=async_op,
                timeout_s=deadline,
            ),
            lambda: rows_back(out, dim),
            async_op,
            deadline,
        )

    def block_lengths(
        self, x: Tensor, dim: int = 0, *, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Return the lengths along `dim` of the blocks of all ranks. Collective.

        Raises:
            PartitionError: on all ranks, if the blocks could not be joined along `dim`.
        """
        dim = check_dim(dim, check_tensor(x, self.device, "block_lengths"), "block_lengths")
        rows = x.detach()
        rows = rows.reshape(1) if rows.dim() == 0 else rows.movedim(dim, 0)
        return self._lengths(rows, dim, None, "block_lengths", timeout_s)

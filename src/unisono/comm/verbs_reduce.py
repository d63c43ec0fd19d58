"""The verbs that add up over ranks: all_reduce, reduce, reduce_scatter, and joining small ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from unisono.comm import checking
from unisono.comm.arguments import (
    check_dim,
    check_not_transformed,
    check_rank,
    check_target,
    check_tensor,
)
from unisono.comm.calling import Caller, contiguous, detached, rows_back, rows_first
from unisono.comm.coalesce import Coalescer
from unisono.comm.pending import Pending
from unisono.comm.reductions import check_op, decode, encode


class ReduceVerbs(Caller):
    """Reductions over the ranks of a communicator."""

    @overload
    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Return the reduction of `x` over all ranks. Collective over the communicator.

        Args:
            x: tensor of the same shape and dtype on every rank.
            op: sum, mean, product, min, max, and, or, xor, or sum64 (float32 added in float64).
            async_op: return a `Pending` instead of waiting.
            timeout_s: deadline of this call.

        Returns:
            The same bits on every rank; `x` is unchanged.
        """
        check_tensor(x, self.device, "all_reduce")
        self._settle(x)
        out = detached(x).clone(memory_format=torch.contiguous_format)
        return self._reduce_into(out, x, op, async_op, timeout_s)

    @overload
    def all_reduce_(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def all_reduce_(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def all_reduce_(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Replace `x` by its reduction over all ranks; see `all_reduce`. Returns `x`."""
        check_target(x, self.device, "all_reduce_")
        self._settle(x)
        return self._reduce_into(x, x, op, async_op, timeout_s)

    def _reduce_into(
        self, out: Tensor, x: Tensor, op: str, async_op: bool, timeout_s: float | None
    ) -> Tensor | Pending[Tensor]:
        check_op(op, x.dtype)
        target = detached(out)
        work = contiguous(encode(target, op))
        coalescer = self._entry.coalescer
        is_held = coalescer is not None and coalescer.takes(work)
        divides_here = op == "mean" and (is_held or not self._engine.knows_mean)
        engine_op = "sum" if divides_here else op

        def finish() -> Tensor:
            if divides_here:
                work.div_(self.size)
            if work is not target:
                target.copy_(decode(work, op, target.dtype))
            if checking.is_enabled() and self.size > 1:
                self._verify_result(call, target, timeout_s)
            return out

        if coalescer is not None and is_held:
            call = self._begin("all_reduce", x, kind=op, async_op=True, timeout_s=timeout_s)
            coalescer.hold(work, engine_op, finish, out)
            call.done = True
            flush = coalescer.flush
            return Pending(lambda _: (flush(), out)[1], lambda: False) if async_op else out
        call = self._begin("all_reduce", x, kind=op, async_op=async_op, timeout_s=timeout_s)
        call.sent = call.received = work.numel() * work.element_size()
        deadline = self._deadline(timeout_s)
        return self._run(
            call,
            lambda: self._engine.all_reduce_(
                work, engine_op, async_op=async_op, timeout_s=deadline
            ),
            finish,
            async_op,
            deadline,
        )

    @overload
    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        op: str = "sum",
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor | None: ...
    @overload
    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        op: str = "sum",
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor | None]: ...
    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor | None] | None:
        """Return the reduction of `x` on rank `dst` of the communicator, None on the others.

        Collective over the communicator. `x` is unchanged everywhere.
        """
        check_tensor(x, self.device, "reduce")
        check_op(op, x.dtype)
        check_rank(dst, self.size, "dst", "reduce")
        # A private copy: backends use the tensor as scratch space on the other ranks.
        work = contiguous(encode(detached(x), op).clone())
        call = self._begin("reduce", x, kind=op, root=dst, async_op=async_op, timeout_s=timeout_s)
        call.sent = work.numel() * work.element_size()
        deadline = self._deadline(timeout_s)

        def finish() -> Tensor | None:
            if self.rank != dst:
                return None
            return decode(work.div_(self.size) if op == "mean" else work, op, x.dtype)

        return self._run(
            call,
            lambda: self._engine.reduce_(
                work, dst, "sum" if op == "mean" else op, async_op=async_op, timeout_s=deadline
            ),
            finish,
            async_op,
            deadline,
        )

    @overload
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: str = "sum",
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: str = "sum",
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | Pending[Tensor]:
        """Return this rank's block along `dim` of the reduction over all ranks.

        Collective over the communicator. `x` has the same shape on every rank; `sizes` are the W
        block sizes along `dim`, balanced when None.
        """
        check_tensor(x, self.device, "reduce_scatter")
        check_op(op, x.dtype)
        dim = check_dim(dim, x, "reduce_scatter")
        rows = rows_first(x, dim)
        blocks_of = self._block_sizes(sizes, rows.shape[0], "reduce_scatter")
        work = encode(rows, op)
        ins = work.split_with_sizes(blocks_of)
        out = work.new_empty((blocks_of[self.rank], *work.shape[1:]))
        call = self._begin(
            "reduce_scatter",
            x,
            kind=op,
            dim=dim,
            sizes=blocks_of,
            async_op=async_op,
            timeout_s=timeout_s,
        )
        call.sent = work.numel() * work.element_size()
        call.received = out.numel() * out.element_size()
        deadline = self._deadline(timeout_s)

        def finish() -> Tensor:
            if op == "mean":
                out.div_(self.size)
            return rows_back(decode(out, op, x.dtype), dim)

        return self._run(
            call,
            lambda: self._engine.reduce_scatter(
                out,
                ins,
                "sum" if op == "mean" else op,
                alike=hash((dim, rows.shape)),
                async_op=async_op,
                timeout_s=deadline,
            ),
            finish,
            async_op,
            deadline,
        )

    @contextlib.contextmanager
    def coalesce(self, max_mb: float = 1.0) -> Iterator[None]:
        """Join the small all_reduces issued inside into one per (op, dtype); results at exit.

        Collective over the communicator: all ranks issue the same all_reduces inside. Tensors
        above `max_mb` are reduced at once. A tensor in memory that waits for a result (the same
        one again, a view of it) first gets this result: what is held is sent then. On an exception
        nothing is sent.
        """
        if self._entry.coalescer is not None:
            yield  # the outer block does it
            return
        coalescer = Coalescer(int(max_mb * 2**20), self._reduce_joined)
        self._entry.coalescer = coalescer
        try:
            yield
        finally:
            self._entry.coalescer = None
        coalescer.flush()

    def _settle(self, x: Tensor) -> None:
        """See that an all_reduce before this one, held by `coalesce`, has its result in `x`."""
        coalescer = self._entry.coalescer
        if coalescer is not None:
            check_not_transformed(x, "all_reduce")
            coalescer.settle(x)

    def _reduce_joined(self, flat: Tensor, op: str) -> None:
        before, self._entry.coalescer = self._entry.coalescer, None
        try:
            self._reduce_into(flat, flat, op, False, None)
        finally:
            self._entry.coalescer = before

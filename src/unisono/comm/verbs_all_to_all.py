"""The verb in which every rank sends a block to every other: all_to_all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from unisono.comm.arguments import check_sizes, check_tensor
from unisono.comm.calling import Caller, rows_first
from unisono.comm.pending import Pending
from unisono.errors import PartitionError


class AllToAllVerb(Caller):
    """Blocks from every rank of a communicator to every other."""

    @overload
    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> Tensor: ...
    @overload
    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[Tensor]: ...
    @overload
    def all_to_all(
        self,
        x: Sequence[Tensor],
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[False] = False,
        timeout_s: float | None = None,
    ) -> list[Tensor]: ...
    @overload
    def all_to_all(
        self,
        x: Sequence[Tensor],
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        async_op: Literal[True],
        timeout_s: float | None = None,
    ) -> Pending[list[Tensor]]: ...
    def all_to_all(
        self,
        x: Tensor | Sequence[Tensor],
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Tensor | list[Tensor] | Pending[Any]:
        """Send a block of rows to every rank and return the rows received, in rank order.

        Collective over the communicator.

        Args:
            x: rows for rank 0, 1, ... along dim 0, or a list with one tensor for each rank (then a
                list is returned).
            send_sizes: rows for each rank; equal shares when None.
            recv_sizes: rows from each rank; learned by one small exchange when None.
            async_op: return a `Pending` instead of waiting.
            timeout_s: deadline of this call.
        """
        is_list = not isinstance(x, Tensor)
        if is_list:
            parts = self._listed(x)
            send_sizes = [part.shape[0] if part.dim() else 1 for part in parts]
            rows = torch.cat([rows_first(part, 0) for part in parts])
        else:
            rows = rows_first(check_tensor(x, self.device, "all_to_all"), 0)
        if send_sizes is None and rows.shape[0] % self.size:
            raise PartitionError.because(
                f"all_to_all of {rows.shape[0]} rows in equal shares",
                f"{self.size} ranks",
                f"{rows.shape[0]} / {self.size} = {rows.shape[0] / self.size:.2f}",
                "send_sizes=[...] with one entry a rank",
            )
        sent = self._block_sizes(send_sizes, rows.shape[0], "all_to_all", what="send_sizes")
        deadline = self._deadline(timeout_s)
        if recv_sizes is None:
            with self._reporting("all_to_all", None, deadline):
                matrix = self._engine.all_gather_ints(sent, timeout_s=deadline)
            got = tuple(row[self.rank] for row in matrix)
        else:
            got = check_sizes(recv_sizes, self.size, "all_to_all", what="recv_sizes")
        out = rows.new_empty((sum(got), *rows.shape[1:]))
        call = self._begin(
            "all_to_all",
            x if isinstance(x, Tensor) else rows,
            dim=0,
            sizes=sent,
            recv_sizes=got,
            async_op=async_op,
            timeout_s=timeout_s,
        )
        call.sent = rows.numel() * rows.element_size()
        call.received = out.numel() * out.element_size()
        return self._run(
            call,
            lambda: self._engine.all_to_all(
                out.split_with_sizes(got),
                rows.split_with_sizes(sent),
                async_op=async_op,
                timeout_s=deadline,
            ),
            lambda: list(out.split_with_sizes(got)) if is_list else out,
            async_op,
            deadline,
        )

    def _listed(self, x: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor for each rank, whose rows have one shape and dtype."""
        given = list(x) if isinstance(x, Sequence) else [x]
        parts = [check_tensor(part, self.device, "all_to_all") for part in given]
        if len(parts) != self.size:
            raise PartitionError.because(
                f"all_to_all of a list of {len(parts)} tensors",
                f"{self.size} ranks",
                f"{len(parts)} != {self.size}",
            )
        kinds = {(part.dtype, tuple(part.shape[1:])): None for part in parts}
        if len(kinds) > 1:
            raise PartitionError.because(
                "all_to_all of a list of unlike tensors",
                "; ".join(f"rows of {list(shape)}, {dtype}" for dtype, shape in kinds),
                None,
                "tensors may differ in their number of rows only",
            )
        return parts

"""The plan of a row fetch: which own rows go to which rank, and how many come back.

Made by graph partitioning, consumed by the row operators. The one plan that holds a tensor: a row
list can have millions of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.errors import PartitionError


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Rows to send to and to receive from each rank of a communicator; frozen and checked.

    The own place in `send_sizes` and `recv_sizes` may be used too: such rows are copied.
    """

    num_rows: int
    """Number of rows of the own block."""
    send_index: Tensor
    """`[sum(send_sizes)]`, int64: own rows to send, grouped by receiving rank, ascending."""
    send_sizes: tuple[int, ...]
    """For each rank, how many of these rows go there."""
    recv_sizes: tuple[int, ...]
    """For each rank, how many rows come from there."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "send_sizes", tuple(self.send_sizes))
        object.__setattr__(self, "recv_sizes", tuple(self.recv_sizes))
        index, sends, recvs = self.send_index, self.send_sizes, self.recv_sizes
        low, high = (int(index.min()), int(index.max())) if index.numel() else (0, -1)
        wrong = None
        if index.dim() != 1 or index.dtype != torch.int64:
            fault = f"send_index of shape {tuple(index.shape)}, {index.dtype}"
            wrong = fault, None, "a 1-D tensor of torch.int64"
        elif len(sends) != len(recvs):
            arithmetic = f"{len(sends)} ranks != {len(recvs)} ranks"
            wrong = None, arithmetic, "one number per rank, 0 where there is nothing"
        elif self.num_rows < 0 or min(sends + recvs, default=0) < 0:
            wrong = f"num_rows {self.num_rows}", None, "counts of 0 or more"
        elif sum(sends) != index.numel():
            arithmetic = f"{sum(sends)} != {index.numel()}"
            wrong = None, arithmetic, "send_sizes must add up to the length of send_index"
        elif low < 0 or high >= self.num_rows:
            arithmetic = f"not 0 <= {low if low < 0 else high} < {self.num_rows}"
            fault = f"send_index from {low} to {high}, {self.num_rows} own rows"
            wrong = fault, arithmetic, "row numbers of the own block, not global ones"
        if wrong is not None:
            call = f"RowPlan(send_sizes={list(sends)}, recv_sizes={list(recvs)})"
            raise PartitionError.because(call, *wrong)

    @classmethod
    def from_lists(
        cls, num_rows: int, rows: Sequence[Sequence[int]], recv_sizes: Sequence[int]
    ) -> RowPlan:
        """Return the plan that sends `rows[q]` to rank `q`."""
        flat = [row for each in rows for row in each]
        return cls(
            num_rows,
            torch.tensor(flat, dtype=torch.int64),
            tuple(len(each) for each in rows),
            tuple(recv_sizes),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowPlan):
            return NotImplemented
        return self._counts() == other._counts() and (
            self.send_index is other.send_index
            or torch.equal(self.send_index.cpu(), other.send_index.cpu())
        )

    def __hash__(self) -> int:
        return hash(self._counts())

    def _counts(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return self.num_rows, self.send_sizes, self.recv_sizes

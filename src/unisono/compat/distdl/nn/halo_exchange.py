"""DistDL's `nn.halo_exchange`: ghosts of a padded tensor, from the nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from unisono.errors import PartitionError
from unisono.nn.planned import PlannedModule
from unisono.nn.structure import Structure, Table
from unisono.topology import Partition

from ..backends.mpi.buffer import MPIBufferManager, manager_or_new
from ..backends.mpi.functional.halo_exchange import FillGhosts, GhostPlan, Slices, ghost_steps
from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = ["HaloExchange"]


class HaloExchange(PlannedModule[GhostPlan], Module):
    """Fill the ghosts of a tensor that is padded for them; collective over `P_x` when it is made.

    Dims are taken in ascending order: those before with their ghosts, those after without.
    Gradients of ghosts are added to the points they stand for. The input is left as it is.

    Args:
        P_x: partition of the input.
        halo_shape: `(dim, 2)`: width of the padding left and right. May be None, as the next two,
            on a rank outside of `P_x`.
        recv_buffer_shape: `(dim, 2)`: width of what comes from left and right.
        send_buffer_shape: `(dim, 2)`: width of what goes there.
        buffer_manager: kept; the layer brings its own memory.
    """

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        halo_shape: Any,
        recv_buffer_shape: Any,
        send_buffer_shape: Any,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        super().__init__()
        self.P_x = layout_of(P_x)
        self.buffer_manager = manager_or_new(buffer_manager)
        self.halo_shape = halo_shape
        self.recv_buffer_shape = recv_buffer_shape
        self.send_buffer_shape = send_buffer_shape
        self._received: list[np.ndarray] = []
        """What comes to each rank of the partition."""
        if self.P_x.active:
            self._received = _agreed_widths(self.P_x, recv_buffer_shape, send_buffer_shape)

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, [widths.tolist() for widths in self._received])

    def _make_plan(self, tables: Sequence[Table]) -> GhostPlan:
        (table,) = tables
        table.dtype(self.P_x)
        self._check_bulk(table)
        shape = table.of(self.P_x.root.rank).shape
        slices = ghost_slices(shape, np.array(self.recv_buffer_shape), self.send_buffer_shape)
        steps = ghost_steps(slices, self.P_x.neighbors(), self.P_x.ranks)
        return GhostPlan(self.P_x.root, steps)

    def _check_bulk(self, table: Table) -> None:
        """Refuse blocks that do not form a grid once their ghosts are taken away."""
        entries = [table.of(rank) for rank in self.P_x.ranks]
        bulk = tuple(
            Structure(tuple(np.subtract(e.shape, widths.sum(1)).tolist()), e.dtype, e.device)
            if len(e.shape) == len(widths)
            else e
            for e, widths in zip(entries, self._received, strict=True)
        )
        Table(self.P_x.ranks, bulk).cuts(self.P_x)
        for place, structure in enumerate(bulk):
            self._check_points(place, structure.shape)

    def _check_points(self, place: int, points: Sequence[int]) -> None:
        """Refuse a rank with fewer points than it is to send, or than none."""
        rank = self.P_x.ranks[place]
        for dim, (left, right) in enumerate(self.P_x.neighbors(place)):
            came, found = self._received[place][dim].tolist(), points[dim]
            if found < 0:
                raise PartitionError.because(
                    f"HaloExchange in dim {dim}",
                    f"rank {rank} has {found + sum(came)} points, padding included",
                    f"ghosts: {came[0]} + {came[1]} > {found + sum(came)}",
                    "pad the input by recv_buffer_shape first",
                )
            to_left = 0 if left is None else int(self._received[left][dim, 1])
            to_right = 0 if right is None else int(self._received[right][dim, 0])
            sent = max(to_left, to_right)
            if sent > found:
                raise PartitionError.because(
                    f"HaloExchange in dim {dim}",
                    f"a neighbour expects {sent} points of rank {rank}, which has {found}",
                    f"{sent} > {found}",
                    "fewer ranks in that dim; unisono.nn.HaloExchange reaches beyond neighbours",
                )

    def forward(self, input: Tensor) -> Tensor:
        """Return a new tensor with its ghosts filled in."""
        if not self.P_x.active:
            return self._outside(input)
        return FillGhosts.apply(self._tied(input), self._plan)


def ghost_slices(shape: Sequence[int], recv: Any, send: Any) -> list[tuple[Slices, ...]]:
    """Return for each dim left bulk, left ghosts, right bulk and right ghosts.

    >>> [left, *_] = ghost_slices((6,), [[1, 2]], [[1, 0]])[0]
    >>> left
    (slice(1, 2, None),)
    """
    bulk = [slice(int(a), n - int(b)) for n, (a, b) in zip(shape, recv, strict=True)]
    whole = [slice(0, n) for n in shape]
    found: list[tuple[Slices, ...]] = []
    for dim, n in enumerate(shape):
        left, right = (int(width) for width in send[dim])
        own = bulk[dim]
        runs = (
            slice(own.start, own.start + left),
            slice(0, own.start),
            slice(own.stop - right, own.stop),
            slice(own.stop, n),
        )
        found.append(tuple((*whole[:dim], run, *bulk[dim + 1 :]) for run in runs))
    return found


def _agreed_widths(P_x: Partition, recv: Any, send: Any) -> list[np.ndarray]:
    """Return what comes to each rank; refuse what neighbours do not see alike. Collective."""
    own = np.array([recv, send], dtype=np.int64)
    if own.shape != (2, P_x.dim, 2):
        # Every rank is told, or the others would wait for this one.
        own = np.full((2, P_x.dim, 2), -1)
    rows = P_x.comm.all_gather_ints(own.ravel().tolist())
    tables = [np.array(row).reshape(2, P_x.dim, 2) for row in rows]
    for rank, (comes, _) in enumerate(tables):
        if comes.min() < 0:
            raise PartitionError.because(
                "HaloExchange",
                f"widths of rank {rank} of {P_x!r}",
                f"not an array of shape ({P_x.dim}, 2)",
                "HaloMixin._compute_exchange_info gives all three",
            )
        for dim, (_, right) in enumerate(P_x.neighbors(rank)):
            if right is None:
                continue
            pairs = (
                (rank, right, tables[rank][1][dim, 1], tables[right][0][dim, 0]),
                (right, rank, tables[right][1][dim, 0], tables[rank][0][dim, 1]),
            )
            for source, target, sent, wanted in pairs:
                if sent != wanted:
                    raise PartitionError.because(
                        f"HaloExchange in dim {dim}",
                        f"rank {source} sends {sent} points, rank {target} expects {wanted}",
                        f"{sent} != {wanted}",
                        "send_buffer_shape of a rank is recv_buffer_shape of its neighbours",
                    )
    return [comes for comes, _ in tables]

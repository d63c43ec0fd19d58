"""DistDL's halo exchange with the nearest neighbours, and its arithmetic for user-defined layers.

One dim after the other, so that corners pass through two ranks. The layers of `unisono.nn` send
them straight from their owner instead, and from any number of ranks away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.compat.distdl.blocks import (
    Ints,
    compute_start_index,
    compute_stop_index,
    compute_subshape,
    compute_subtensor_start_indices,
)
from unisono.compat.distdl.layers import Module
from unisono.compat.distdl.partitions import MPIPartition, check_null_rank, layout_of
from unisono.compat.distdl.structures import MPIBufferManager, TensorStructure, manager_or_new
from unisono.errors import PartitionError
from unisono.nn.agreement import Table, cuts_of_blocks
from unisono.nn.planned import PlannedModule
from unisono.operators import all_to_all
from unisono.operators.linear import identity
from unisono.topology import Partition
from unisono.topology.resample import Resampling, WeightedPoints

Slices = tuple[slice, ...]


class HaloExchangeFunction:
    """Ghosts of a tensor that is padded for them; gradients of ghosts are added to their points."""

    @staticmethod
    def apply(
        input: Tensor,
        P_x: MPIPartition,
        slices: Sequence[Sequence[Slices]],
        buffers: Any,  # noqa: ARG004
        neighbor_ranks: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Return a new tensor with its ghosts filled in. Collective over `P_x`.

        Args:
            input: own block with room for ghosts on all sides.
            P_x: partition of the input.
            slices: for each dim left bulk, left ghosts, right bulk, right ghosts.
            buffers: not needed.
            neighbor_ranks: from `P_x.neighbor_ranks(P_x.rank)`.
        """
        if not P_x.active:
            return identity(input)
        return filled(input, layout_of(P_x).comm, slices, neighbor_ranks)


def filled(
    x: Tensor,
    comm: Communicator,
    slices: Sequence[Sequence[Slices]],
    neighbors: Sequence[tuple[int | None, int | None]],
) -> Tensor:
    """Return a copy of `x` with its ghosts filled in, dim by dim. Collective over `comm`.

    Args:
        x: own block with room for ghosts.
        comm: the members of the partition.
        slices: for each dim left bulk, left ghosts, right bulk, right ghosts.
        neighbors: for each dim the members left and right; none at the ends.
    """
    x = x.clone()
    for boxes, pair in zip(slices, neighbors, strict=True):
        sides = {
            rank: both
            for rank, both in zip(pair, (boxes[:2], boxes[2:]), strict=True)
            if rank is not None and not check_null_rank(rank)
        }
        if not sides:
            continue
        sends, recvs = [0] * comm.size, [0] * comm.size
        for rank, (bulk, ghosts) in sides.items():
            sends[rank], recvs[rank] = x[bulk].numel(), x[ghosts].numel()
        going = torch.cat([x[sides[rank][0]].reshape(-1) for rank in sorted(sides)])
        coming = all_to_all(going, sends, recvs, comm=comm).split(recvs)
        for rank, (_, ghosts) in sides.items():
            # Without points, too: the backward of every rank has to come by.
            x[ghosts] = coming[rank].view(x[ghosts].shape)
    return x


class HaloExchange(PlannedModule, Module):
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
        self._widths: list[np.ndarray] = []
        """What comes to each rank of the partition, and what it sends."""
        if self.P_x.active:
            self._widths = _agreed_widths(self.P_x, recv_buffer_shape, send_buffer_shape)

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x, [widths.tolist() for widths in self._widths])

    def _make_plan(self, tables: Sequence[Table]) -> list[tuple[Slices, ...]]:
        (table,) = tables
        table.dtype(self.P_x)
        shapes = table.shapes(self.P_x)
        bulks: list[tuple[int, ...]] = []
        for rank, shape, (comes, goes) in zip(self.P_x.ranks, shapes, self._widths, strict=True):
            bulk = np.subtract(shape, comes.sum(1)) if len(shape) == len(comes) else np.array(shape)
            if len(bulk) == len(goes) and (bulk < np.maximum(goes.max(1), 0)).any():
                raise PartitionError.because(
                    "HaloExchange",
                    f"rank {rank} has {list(shape)} points, padding included, and "
                    f"{comes.tolist()} ghosts; it sends {goes.tolist()}",
                    "fewer points than are sent",
                    "pad the input by recv_buffer_shape first; or unisono.nn.HaloExchange, which "
                    "reaches beyond neighbours",
                )
            bulks.append(tuple(bulk.tolist()))
        cuts_of_blocks(bulks, self.P_x)
        own = shapes[self.P_x.rank or 0]
        return ghost_slices(own, np.array(self.recv_buffer_shape), self.send_buffer_shape)

    def forward(self, input: Tensor) -> Tensor:
        """Return a new tensor with its ghosts filled in."""
        if not self.P_x.active:
            return self._outside(input)
        return filled(self._tied(input), self.P_x.comm, self._plan, self.P_x.neighbors())


def ghost_slices(shape: Sequence[int], recv: Any, send: Any) -> list[tuple[Slices, ...]]:
    """Return for each dim left bulk, left ghosts, right bulk and right ghosts.

    >>> [left, *_] = ghost_slices((6,), [[1, 2]], [[1, 0]])[0]
    >>> left
    (slice(1, 2, None),)
    """
    bulk = [slice(int(a), n - int(b)) for n, (a, b) in zip(shape, recv, strict=True)]
    whole = [slice(0, n) for n in shape]
    boxes: list[tuple[Slices, ...]] = []
    for dim, n in enumerate(shape):
        left, right = (int(width) for width in send[dim])
        points = bulk[dim]
        runs = (
            slice(points.start, points.start + left),
            slice(0, points.start),
            slice(points.stop - right, points.stop),
            slice(points.stop, n),
        )
        boxes.append(tuple((*whole[:dim], run, *bulk[dim + 1 :]) for run in runs))
    return boxes


def _agreed_widths(P_x: Partition, recv: Any, send: Any) -> list[np.ndarray]:
    """Return what comes to each rank and what goes; refuse what neighbours do not see alike.

    Collective.
    """
    widths, form = np.array([recv, send], dtype=np.int64), (2, P_x.dim, 2)
    fits = widths.shape == form  # else the others would wait for this rank
    rows = P_x.comm.all_gather_ints((widths if fits else np.full(form, -1)).ravel().tolist())
    tables = [np.array(row).reshape(form) for row in rows]
    for rank, table in enumerate(tables):
        if table[0].min() < 0:
            raise PartitionError.because(
                "HaloExchange",
                f"widths of rank {rank} of {P_x!r}",
                f"not an array of shape ({P_x.dim}, 2)",
                "HaloMixin._compute_exchange_info gives all three",
            )
    for rank, table in enumerate(tables):
        for dim, pair in enumerate(P_x.neighbors(rank)):
            for side, other in enumerate(pair):
                if other is None:
                    continue
                sent, expected = table[1, dim, side], tables[other][0, dim, 1 - side]
                if sent != expected:
                    raise PartitionError.because(
                        f"HaloExchange in dim {dim}",
                        f"rank {rank} sends {sent} points, rank {other} expects {expected}",
                        f"{sent} != {expected}",
                        "send_buffer_shape of a rank is recv_buffer_shape of its neighbours",
                    )
    return tables


Widths = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Halo widths, those received, those sent, and the needed range; each of shape `(dim, 2)`."""
NoWidths = tuple[None, None, None, None]
"""The same on an inactive rank."""


def exchange_widths(
    needed: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    block: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    index: np.ndarray,
    parts: np.ndarray,
    outputs: np.ndarray,
    *,
    cuts_right: bool,
) -> Widths:
    """Return the widths of one rank towards its nearest neighbours.

    Args:
        needed: first input of an output, and the input after the last one of another.
        block: start and sizes of the block of inputs at an index.
        index: own place.
        parts: number of ranks in each dim.
        outputs: sizes of the whole output, which is in balanced blocks.
        cuts_right: whether points that are not needed at the right are left out.
    """

    def signed_halo(place: np.ndarray) -> np.ndarray:
        """Return left and right halo; negative: own points that are not needed."""
        start, size = block(place)
        first = compute_start_index(parts, place, outputs)
        after = compute_stop_index(parts, place, outputs)
        # A rank without outputs needs nothing: all of its points are cut off at the left.
        idle = first == after
        low, high = needed(np.where(idle, 0, first), np.where(idle, 0, after - 1))
        left, right = np.where(idle, -size, start - low), np.where(idle, 0, high - (start + size))
        return np.stack([left, right], axis=1)

    signed, size = signed_halo(index), block(index)[1]
    halo = np.maximum(signed, 0)
    send = np.zeros_like(halo)
    for dim in range(len(parts)):
        step = (np.arange(len(parts)) == dim).astype(np.int64)
        if index[dim] > 0:
            send[dim, 0] = max(0, signed_halo(index - step)[dim, 1])
        if index[dim] + 1 < parts[dim]:
            send[dim, 1] = max(0, signed_halo(index + step)[dim, 0])
    start = -np.minimum(signed[:, 0], 0)
    stop = size + halo[:, 0] + (signed if cuts_right else halo)[:, 1]
    return halo, halo.copy(), send, np.stack([start, np.maximum(start, stop)], axis=1)


class ConvMixin:
    """First and last input, padding included, that an output reads. Ints or arrays of them."""

    def _compute_min_input_range(
        self,
        idx: Any,
        kernel_size: Any,  # noqa: ARG002 - the same for both ends
        stride: Any,
        padding: Any,
        dilation: Any,  # noqa: ARG002
    ) -> Any:
        """Return the first input of output `idx`."""
        return stride * idx - padding

    def _compute_max_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> Any:
        """Return the last input of output `idx`."""
        return stride * idx - padding + dilation * (kernel_size - 1)


class PoolingMixin(ConvMixin):
    """First and last input that an output reads: the same as those of a convolution."""


class HaloMixin:
    """Halos towards the nearest neighbours; for use with `ConvMixin` or `PoolingMixin`."""

    _compute_min_input_range: Any
    _compute_max_input_range: Any

    def _compute_exchange_info(
        self,
        x_global_shape: Ints,
        kernel_size: Ints,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        partition_active: bool,
        partition_shape: Ints,
        partition_index: Ints | None,
        subtensor_shapes: np.ndarray | None = None,
    ) -> Widths | NoWidths:
        """Return halo widths, those received, those sent, and which points to compute with.

        Each is an array `(dim, 2)`; four times None on an inactive rank. The last one is relative
        to the block with its halos.

        Args:
            x_global_shape: of the whole input.
            kernel_size: of the last dims, as many as are given; likewise the next three.
            partition_active: whether this rank holds a block.
            partition_shape: number of ranks in each dim.
            partition_index: own place.
            subtensor_shapes: sizes of all blocks where they are not balanced.
        """
        if not partition_active or partition_index is None:
            return None, None, None, None
        x = np.atleast_1d(np.asarray(x_global_shape, dtype=np.int64))
        settings = ((kernel_size, 1), (stride, 1), (padding, 0), (dilation, 1))
        window = [_filled(values, len(x), missing) for values, missing in settings]
        kernels, strides, paddings, dilations = window
        y = (x + 2 * paddings - dilations * (kernels - 1) - 1) // strides + 1
        parts, index = np.atleast_1d(partition_shape), np.atleast_1d(partition_index)

        def block(place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            if subtensor_shapes is None:
                return compute_start_index(parts, place, x), compute_subshape(parts, place, x)
            at = tuple(int(i) for i in place)
            return compute_subtensor_start_indices(subtensor_shapes)[at], subtensor_shapes[at]

        def needed(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            low = np.maximum(self._compute_min_input_range(first, *window), 0)
            return low, np.minimum(self._compute_max_input_range(last, *window), x - 1) + 1

        cuts_right = subtensor_shapes is not None
        return exchange_widths(needed, block, index, parts, y, cuts_right=cuts_right)


def _filled(values: Ints, dims: int, missing: int) -> np.ndarray:
    """Return the values with `missing` for the leading dims that have none."""
    numbers = np.atleast_1d(np.asarray(values, dtype=np.int64))
    return np.concatenate([np.full(dims - len(numbers), missing, dtype=np.int64), numbers])


_KINDS = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}
Scale = float | Sequence[float] | None


def _needed(end: Callable[[WeightedPoints], int], doc: str) -> Callable[..., np.ndarray]:
    def needed(
        self: object,  # noqa: ARG001 - it becomes a method
        y_global_idx: Any,
        x_global_shape: Any,
        y_global_shape: Any,
        scale_factor: Scale,
        mode: str,
        align_corners: bool,
        double: bool = False,
    ) -> np.ndarray:
        kind = _KINDS.get(mode, mode)
        aligned = align_corners and not kind.startswith("nearest")
        dims = range(2, len(x_global_shape))
        factors = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * len(dims)
        taps = [WeightedPoints((int(i),), (1.0,)) for i in y_global_idx[:2]]
        for dim, scale in zip(dims, factors, strict=True):
            at, x, y = (int(of[dim]) for of in (y_global_idx, x_global_shape, y_global_shape))
            taps.append(Resampling(x, y, kind, scale, aligned, double).taps(at))
        return np.array([end(tap) for tap in taps])

    needed.__doc__ = doc
    return needed


class InterpolateMixin:
    """Inputs of an output, dim by dim; batch and channels are not resampled.

    `double` is for values of float64, of which torch may take another nearest point.
    """

    _compute_needed_start = _needed(
        lambda taps: taps.points[0],
        "Return the first input that the output at `y_global_idx` reads, in each dim.",
    )
    _compute_needed_stop = _needed(
        lambda taps: taps.points[-1] + 1,
        "Return the input after the last one that the output at `y_global_idx` reads.",
    )

    def _compute_exchange_info(
        self,
        P_x: MPIPartition,
        x_structure: TensorStructure,
        y_structure: TensorStructure,
        scale_factor: Scale,
        mode: str,
        align_corners: bool,
    ) -> Widths | NoWidths:
        """Return halo widths, those received, those sent, and which points to compute with.

        Each is an array `(dim, 2)`; four times None on an inactive rank. Input and output are in
        balanced blocks.
        """
        if not P_x.active or P_x.index is None:
            return None, None, None, None
        x, y = (np.array(s.shape, dtype=np.int64) for s in (x_structure, y_structure))
        # Named only where it matters, for classes with DistDL's own signature of the two.
        double = {"double": True} if x_structure.dtype == torch.float64 else {}

        rest = (x, y, scale_factor, mode, align_corners)

        def needed(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            low = self._compute_needed_start(first, *rest, **double)
            return low, self._compute_needed_stop(last, *rest, **double)

        def block(place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            ends = (P_x.shape, place, x)
            return compute_start_index(*ends), compute_subshape(*ends)

        return exchange_widths(needed, block, P_x.index, P_x.shape, y, cuts_right=True)

"""Layers whose weight is a grid of blocks: input on `P_x`, products on `P_w`, sums on `P_y`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unisono.errors import PartitionError
from unisono.nn.agreement import Cuts, Table
from unisono.nn.parameters import nothing, part
from unisono.nn.planned import PlannedModule
from unisono.nn.precision import NARROW
from unisono.operators.partitioned import FanPlan, collect, fan_plan, spread
from unisono.topology import Partition, broadcast_groups, reduce_groups
from unisono.topology.decompose import Interval
from unisono.topology.halo import HaloPlan


@dataclass(frozen=True)
class GridPlan:
    """What one rank does: fill a window, pass it on, multiply, add up."""

    halo: HaloPlan | None
    """Of the window, on a rank of `P_x`."""
    to_weights: FanPlan
    """Windows from `P_x` to `P_w`."""
    to_outputs: FanPlan
    """Products from `P_w`, summed on `P_y`."""
    product_shape: tuple[int, ...]
    """Shape of the own product, on a rank of `P_w`."""


class GridLayer(PlannedModule):
    """A layer `P_w` of which is a grid of batch, outputs, inputs, then space.

    Channels or features lie along one dim of input and output. `P_w` may leave out a batch that is
    not split.
    """

    _plan: GridPlan

    P_y: Partition
    P_w: Partition

    def _lay_out(
        self, P_x: Partition, P_y: Partition, P_w: Partition, dim: int, *, grouped: bool = False
    ) -> None:
        """Make the grid; raise unless the partitions fit each other.

        Args:
            P_x: partition of the input; likewise `P_y` of the output, `P_w` of the weight.
            dim: of channels or features.
            grouped: inputs are not summed over: each place reads all of them, or has its own.
        """
        P_x.check_same_root(P_y)
        P_x.check_same_root(P_w)
        self.P_x, self.P_y, self.P_w, self._dim = P_x, P_y, P_w, dim
        name = type(self).__name__
        shapes = f"P_x {list(P_x.shape)}, P_y {list(P_y.shape)}, P_w {list(P_w.shape)}"
        lead, space = P_x.shape[:dim], P_x.shape[dim + 1 :]
        others = *P_y.shape[:dim], *P_y.shape[dim + 1 :]
        if (*lead, *space) != others:
            raise PartitionError.because(
                name,
                shapes,
                f"{[*lead, *space]} != {list(others)} outside of dim {dim}",
                f"P_x and P_y may differ in dim {dim} only",
            )
        batch, outs, ins = math.prod(lead), P_y.shape[dim], P_x.shape[dim]
        grid_shape = (batch, outs, 1 if grouped else ins, *space)
        fitting = [grid_shape, (*lead, *grid_shape[1:])]
        if batch == 1:
            fitting.insert(0, grid_shape[1:])
        if P_w.shape not in fitting:
            short = list(fitting[0])
            note = " (groups take 1 in input channels)" if grouped else ""
            hint = f"Partition({short})"
            raise PartitionError.because(name, shapes, f"P_w must be {short}{note}", hint)
        self._grid = P_w.reshape(grid_shape)
        self._inputs = P_x.reshape((batch, ins, 1, *space) if grouped else (batch, 1, ins, *space))
        self._to_weights = broadcast_groups(self._inputs, self._grid)
        self._to_outputs = reduce_groups(self._grid, P_y.reshape((batch, outs, 1, *space)))
        self._index: tuple[int, ...] | None = None
        """Own place in the grid; None outside of it."""
        self._block_users: Partition | None = None
        if P_w.root.rank in P_w.ranks:
            place = self._grid.ranks.index(P_w.root.rank)
            self._index = self._grid.index_of(place)
            self._block_users = self._grid.sub((0, *range(3, self._grid.dim)), rank=place)

    def _make_parameters(
        self,
        shape: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        """Draw the own blocks of a weight of this shape, and of the bias: where inputs begin."""
        self.use_bias = bias
        used, used_bias = nothing(shape), nothing(shape[:1])
        if self._index is not None:
            outs, depth = self._blocks(self._index)
            used = part(shape, {0: outs, 1: depth})
            if self._index[2] == 0:
                used_bias = part(shape[:1], {0: outs})
        uncut = self._grid.shape[1] == self._grid.shape[2] == 1
        everywhere = uncut and self.P_w.size == self.P_w.root.size
        biases = used_bias if bias else None
        self._draw(used, biases, everywhere=everywhere, dtype=dtype, device=device)

    @abstractmethod
    def _blocks(self, index: Sequence[int]) -> tuple[Interval, Interval]:
        """Return outputs and the range of the weight's dim 1 of a place of the grid."""

    @abstractmethod
    def _window_at(self, cuts: Cuts, index: Sequence[int]) -> HaloPlan:
        """Return how the window of a place of `P_x` is filled."""

    @abstractmethod
    def _product(
        self, window: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        """Return the own product, of this shape."""

    @property
    def receives_bias(self) -> bool:
        """Whether this rank computes with the bias."""
        return self.use_bias and self._index is not None and self._index[2] == 0

    def _users(self, name: str) -> Partition | None:  # noqa: ARG002
        return self._block_users

    def _make_plan(self, tables: Sequence[Table]) -> GridPlan:
        (table,) = tables
        P_x, root, dim = self.P_x, self.P_x.root, self._dim
        cuts, dtype = table.cuts(P_x), table.dtype(P_x)
        self._check([cut[-1] for cut in cuts])
        windows = {
            rank: self._window_at(cuts, P_x.index_of(place)) for place, rank in enumerate(P_x.ranks)
        }
        products: dict[int, tuple[int, ...]] = {}
        for place, rank in enumerate(self._grid.ranks):
            index = self._grid.index_of(place)
            source = self._inputs.rank_at((index[0], 0, 0, *index[3:]))
            shape = windows[P_x.ranks[source]].output_shape
            first, last = self._blocks(index)[0]
            products[rank] = (*shape[:dim], last - first, *shape[dim + 1 :])
        to_weights = [windows[group.root].window_shape for group in self._to_weights]
        to_outputs = [products[group.peers[0]] for group in self._to_outputs]
        empty = (*table.of(root.rank).shape[:1], 0)
        return GridPlan(
            windows.get(root.rank),
            fan_plan(self._to_weights, root, to_weights, dtype),
            fan_plan(self._to_outputs, root, to_outputs, dtype, empty=empty),
            products.get(root.rank, (0,)),
        )

    def _check(self, shape: Sequence[int]) -> None:
        """Raise for a whole input, of this shape, that the layer does not take."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's block of the result on `P_y`."""
        if not self._takes_part:
            return self._outside(input)
        plan = self._plan
        y = spread(self._window(input), plan.to_weights)
        if self._index is not None:
            names = ("weight", "bias") if self.receives_bias else ("weight",)
            weight, *bias = self._used(*names)
            y = self._product(y, weight, bias[0] if bias else None, plan.product_shape)
        dtype, kind = plan.to_outputs.dtype, y.device.type
        if dtype not in (torch.float32, *NARROW) or not torch.is_autocast_enabled(kind):
            return collect(y.to(dtype), plan.to_outputs)
        # Products have another dtype then; a rank without one has to know it, too.
        dtype = torch.get_autocast_dtype(kind)
        return collect(y.to(dtype), replace(plan.to_outputs, dtype=dtype))

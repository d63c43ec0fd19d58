"""`HaloExchange` and `DistributedPad`: the windows and the padding of split tensors as layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from unisono.errors import PartitionError
from unisono.expect import expect_choice
from unisono.nn.agreement import Cuts, Table
from unisono.nn.layers.conv import Size
from unisono.nn.planned import PlannedModule, index_in
from unisono.topology import Partition, halo
from unisono.topology.decompose import split_cuts
from unisono.topology.halo import Axis, HaloPlan
from unisono.topology.window import PAD_MODES, check_window, copied, window


class _Windowed(PlannedModule):
    """A layer that fills a window from the blocks under it."""

    def _plan_at(self, cuts: Cuts, index: tuple[int, ...]) -> HaloPlan:
        raise TypeError(f"{type(self).__name__} has no plan for {cuts} at {index}")

    def _make_plan(self, tables: Sequence[Table]) -> HaloPlan:
        (table,) = tables
        table.dtype(self.P_x)
        return self._plan_at(table.cuts(self.P_x), index_in(self.P_x))

    def forward(self, input: Tensor) -> Tensor:
        """Return the own window."""
        return self._window(input) if self._takes_part else self._outside(input)


class HaloExchange(_Windowed):
    """Give each rank the points that its share of a convolution or stencil reads.

    Args:
        P_x: partition of the input.
        kernel_size: one int for each of the last dims, or one for all dims.
        stride: as in a convolution; likewise `padding`, `dilation`, `padding_mode`.
        fill: the constant of mode "zeros".
    """

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size = 1,
        padding: int | str | Sequence[int | tuple[int, int]] = 0,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        fill: float = 0.0,
    ) -> None:
        super().__init__()
        self.P_x = P_x
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.padding_mode = padding_mode
        self.fill = fill

    def _plan_at(self, cuts: Cuts, index: tuple[int, ...]) -> HaloPlan:
        return halo.plan(
            cuts, index, self.kernel_size, self.stride, self.padding, self.dilation,
            self.padding_mode, self.fill,
        )  # fmt: skip


class DistributedPad(_Windowed):
    """`torch.nn.functional.pad` of a split tensor.

    Args:
        P_x: partition of the input.
        padding: `(left, right)` of the last dim, then of the one before it, as in `F.pad`.
        mode: "constant", "reflect", "replicate" or "circular".
        value: the constant.
        balance: give every rank its balanced block of the padded tensor. Otherwise the ranks at
            the ends grow and all others keep what they have.
    """

    def __init__(
        self,
        P_x: Partition,
        padding: Sequence[int],
        mode: str = "constant",
        value: float = 0.0,
        balance: bool = False,
    ) -> None:
        super().__init__()
        expect_choice("mode", mode, PAD_MODES, error=PartitionError)
        if len(padding) % 2 or len(padding) > 2 * P_x.dim:
            raise PartitionError.because(
                f"DistributedPad(padding={list(padding)})",
                f"{P_x!r}",
                f"{len(padding)} numbers for {P_x.dim} dims",
                "two for each padded dim, from the last dim on",
            )
        self.P_x = P_x
        self.padding = tuple(map(int, padding))
        self.mode = mode
        self.value = value
        self.balance = balance

    def _plan_at(self, cuts: Cuts, index: tuple[int, ...]) -> HaloPlan:
        mode = PAD_MODES[self.mode]
        axes: list[Axis] = []
        for dim, bounds in enumerate(cuts):
            at = 2 * (len(cuts) - 1 - dim)
            left, right = self.padding[at : at + 2] if at < len(self.padding) else (0, 0)
            x = bounds[-1]
            if mode != "zeros":
                check_window(x, 1, 1, left, right, 1, mode, dim=dim)
            elif x + left + right < 0:
                raise PartitionError.because(
                    f"DistributedPad(padding={list(self.padding)})",
                    f"{x} points in dim {dim}",
                    f"{x} + {left} + {right} < 0",
                    "cut off less",
                )
            after = self._cuts_after(bounds, left, right)
            padded = partial(window, x=x, k=1, pl=left, pr=max(right, 0), mode=mode)
            axes.append(Axis(after, copied if left == right == 0 else padded))
        return halo.plan_windows(cuts, index, axes, fill=self.value)

    def _cuts_after(self, bounds: Sequence[int], left: int, right: int) -> tuple[int, ...]:
        total = bounds[-1] + left + right
        if self.balance:
            return split_cuts(total, len(bounds) - 1)
        inner = (min(max(cut + left, 0), total) for cut in bounds[1:-1])
        return (0, *inner, total)

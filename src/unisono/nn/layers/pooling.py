"""Pooling split in any dims: torch's functions on blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.nn.layers.conv import Size
from unisono.nn.layers.function_layer import FunctionLayer
from unisono.nn.planned import check_dims
from unisono.topology import Partition
from unisono.topology.window import check_pool, per_dim

_MAX: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG: dict[int, Callable[..., Any]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class _Pool(FunctionLayer):
    """What the pooling layers share."""

    dims: ClassVar[int]
    ceil_mode: bool

    def __init__(
        self, P_x: Partition, kernel_size: Size, stride: Size | None, padding: Size, dilation: Size
    ) -> None:
        super().__init__()
        check_dims(type(self).__name__, P_x, self.dims + 2, self.dims + 2)
        self.P_x = P_x
        self.kernel_size = per_dim(kernel_size, self.dims, "kernel_size")
        self.stride = per_dim(kernel_size if stride is None else stride, self.dims, "stride")
        self.padding = per_dim(padding, self.dims, "padding")
        self.dilation = per_dim(dilation, self.dims, "dilation")
        for dim, (k, p, d) in enumerate(
            zip(self.kernel_size, self.padding, self.dilation, strict=True)
        ):
            check_pool(k, p, d, dim=dim)


class _MaxPool(_Pool):
    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, dilation)
        self.return_indices = return_indices
        self.ceil_mode = ceil_mode

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's share; with `return_indices` also flat indices in the whole image."""
        if not self._takes_part:
            outside = self._outside(input)
            return (outside, outside.long()) if self.return_indices else outside
        return self._called(
            _MAX[self.dims],
            self._tied(input),
            *(self.kernel_size, self.stride, self.padding, self.dilation),
            ceil_mode=self.ceil_mode,
            return_indices=self.return_indices,
        )


class _AvgPool(_Pool):
    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, 1)
        self.ceil_mode = ceil_mode
        self.count_include_pad = count_include_pad
        self.divisor_override = divisor_override
        if divisor_override == 0:
            raise PartitionError.because(
                f"{type(self).__name__}(divisor_override=0)", hint="a number other than 0, or None"
            )

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: ARG002
        if not dtype.is_floating_point and dtype != torch.int64:
            raise PartitionError.because(
                f"{type(self).__name__} of {dtype}",
                "averages are of floating dtypes, or of int64 and rounded towards 0",
                None,
                "x.float()",
            )

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's share of the averages."""
        if not self._takes_part:
            return self._outside(input)
        divisor = () if self.dims == 1 else (self.divisor_override,)
        return self._called(
            _AVG[self.dims],
            self._tied(input),
            *(self.kernel_size, self.stride, self.padding),
            *(self.ceil_mode, self.count_include_pad, *divisor),
        )


class DistributedMaxPool1d(_MaxPool):
    """`torch.nn.MaxPool1d` of a split tensor `(N, C, L)`."""

    dims = 1


class DistributedMaxPool2d(_MaxPool):
    """`torch.nn.MaxPool2d` of a split tensor `(N, C, H, W)`."""

    dims = 2


class DistributedMaxPool3d(_MaxPool):
    """`torch.nn.MaxPool3d` of a split tensor `(N, C, D, H, W)`."""

    dims = 3


class DistributedAvgPool1d(_AvgPool):
    """`torch.nn.AvgPool1d` of a split tensor `(N, C, L)`."""

    dims = 1

    def __init__(
        self,
        P_x: Partition,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(P_x, kernel_size, stride, padding, ceil_mode, count_include_pad)


class DistributedAvgPool2d(_AvgPool):
    """`torch.nn.AvgPool2d` of a split tensor `(N, C, H, W)`."""

    dims = 2


class DistributedAvgPool3d(_AvgPool):
    """`torch.nn.AvgPool3d` of a split tensor `(N, C, D, H, W)`."""

    dims = 3

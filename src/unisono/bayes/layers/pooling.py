"""`AvgPool2d` and `MaxPool2d`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.bayes.layers.window import WindowLayer
from unisono.bayes.moments import Delta, Moments


class AvgPool2d(WindowLayer):
    """Mean over windows of independent units; padding counts as zeros.

    Args:
        kernel_size: side of the window.
        stride: step of the window; -1 is `kernel_size`.
        padding: zeros around the image.
        padding_type: 1 on all four sides, 2 on the right and the bottom only, else none.
    """

    def __init__(
        self, kernel_size: int, stride: int = -1, padding: int = 0, padding_type: int = 0
    ) -> None:
        stride = kernel_size if stride == -1 else stride
        super().__init__(kernel_size, stride, padding, padding_type)

    def forward(self, x: Moments) -> Moments:
        """`mu = sum m / k^2`, `var = sum v / k^4`."""
        x = self._images(x)
        area = self.kernel_size**2
        mean = F.avg_pool2d(self._padded(x.mean), self.kernel_size, self.stride)
        var = None
        if x.var is not None:
            var = F.avg_pool2d(self._padded(x.var), self.kernel_size, self.stride).div_(area)
        self._remember(x.slope, self._padded(x.mean))
        return Moments(mean, var)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Share each window's delta out over its entries."""
        if not to_input:
            return None
        slope, like = self._memory
        delta = delta.reshaped(like.shape[0], self.out_channels, self.out_height, self.out_width)
        mean, var = (self._shared_out(d.contiguous(), like) for d in delta)
        return Delta(mean, var.div_(self.kernel_size**2)).through_(slope)

    def _shared_out(self, delta: Tensor, like: Tensor) -> Tensor:
        kernel, stride = [self.kernel_size] * 2, [self.stride] * 2
        spread = torch.ops.aten.avg_pool2d_backward(
            delta, like, kernel, stride, [0, 0], False, True, None
        )
        return self._cropped(spread)


class MaxPool2d(WindowLayer):
    """The entry of each window with the largest mean (the first of equals), padding never.

    Args:
        kernel_size: side of the window.
        stride: step of the window; -1 is `kernel_size`.
        padding: width of the frame around the image.
        padding_type: 1 on all four sides, 2 on the right and the bottom only, else none.
    """

    def __init__(
        self, kernel_size: int, stride: int = 1, padding: int = 0, padding_type: int = 0
    ) -> None:
        stride = kernel_size if stride == -1 else stride
        super().__init__(kernel_size, stride, padding, padding_type)

    def forward(self, x: Moments) -> Moments:
        """Mean and variance of the chosen entries."""
        x = self._images(x)
        framed = self._padded(x.mean, -math.inf)
        mean, index = F.max_pool2d_with_indices(framed, [self.kernel_size] * 2, [self.stride] * 2)
        var = None
        if x.var is not None:
            flat = self._padded(x.var).flatten(2)
            var = flat.gather(2, index.flatten(2)).view(mean.shape)
        self._remember(x.slope, index, framed.shape)
        return Moments(mean, var)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Add each window's delta to the entry it chose."""
        if not to_input:
            return None
        slope, index, framed = self._memory
        index = index.flatten(2)
        mean, var = (
            d.new_zeros(framed).flatten(2).scatter_add_(2, index, d.reshape(index.shape))
            for d in delta
        )
        back = Delta(self._cropped(mean.view(framed)), self._cropped(var.view(framed)))
        return back.through_(slope)

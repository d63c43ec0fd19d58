"""`AvgPool2d` and `MaxPool2d`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.bayes.arrays import check_sizes
from unisono.bayes.base_layer import BaseLayer, Shape
from unisono.bayes.geometry import image_shape, total_padding, window_outputs
from unisono.bayes.moments import Delta, Moments


class _Pool(BaseLayer):
    """Windows over each channel."""

    def __init__(self, kernel_size: int, stride: int, padding: int, padding_type: int) -> None:
        super().__init__()
        stride = kernel_size if stride == -1 else stride
        check_sizes(self.get_layer_name(), kernel_size=kernel_size, stride=stride)
        check_sizes(self.get_layer_name(), 0, padding=padding)
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.padding_type = padding, padding_type
        self._image: tuple[int, int, int] | None = None

    def get_layer_info(self) -> str:
        """Return name, channels, output size and kernel."""
        return (
            f"{self.get_layer_name()}({self.out_channels},{self.out_channels},"
            f"{self.out_width},{self.out_height},{self.kernel_size})"
        )

    def fixed_input(self) -> int | None:
        """The image it was told of, if any."""
        return self.in_channels * self.in_height * self.in_width or None

    def plan(self, shape: Shape | None) -> Shape | None:
        """Work out height and width of the output."""
        if shape is not None and len(shape) == 3:
            image = image_shape(shape, 0, 0, 0, self.get_layer_info())
        else:
            size = (self.in_channels, self.in_height, self.in_width)
            image = image_shape(shape, *size, self.get_layer_info())
        if image is None:
            return None
        padded = total_padding(self.padding, self.padding_type)
        height, width = (
            window_outputs(size, self.kernel_size, self.stride, padded, self.get_layer_name(), dim)
            for size, dim in zip(image[1:], ("height", "width"), strict=True)
        )
        self._image = image
        return self._set_shapes(image, (image[0], height, width))

    def _sides(self) -> tuple[int, int, int, int]:
        """Padding left, right, top, bottom."""
        far = self.padding if self.padding_type in (1, 2) else 0
        near = self.padding if self.padding_type == 1 else 0
        return near, far, near, far

    def _padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        return F.pad(x, self._sides(), value=value) if any(self._sides()) else x

    def _cropped(self, x: Tensor) -> Tensor:
        near, far, _, _ = self._sides()
        return x[..., near : x.shape[-2] - far, near : x.shape[-1] - far] if far else x

    def _reshaped(self, x: Moments) -> Moments:
        return x.reshaped(x.mean.shape[0], *(self._image or x.mean.shape[1:]))


class AvgPool2d(_Pool):
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
        super().__init__(kernel_size, stride, padding, padding_type)

    def forward(self, x: Moments) -> Moments:
        """`mu = sum m / k^2`, `var = sum v / k^4`."""
        x = self._reshaped(x)
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


class MaxPool2d(_Pool):
    """The entry of each window with the largest mean (the first of equals), padding never.

    Args:
        kernel_size: side of the window.
        stride: step of the window.
        padding: width of the frame around the image.
        padding_type: 1 on all four sides, 2 on the right and the bottom only, else none.
    """

    def __init__(
        self, kernel_size: int, stride: int = 1, padding: int = 0, padding_type: int = 0
    ) -> None:
        super().__init__(kernel_size, stride, padding, padding_type)

    def forward(self, x: Moments) -> Moments:
        """Mean and variance of the chosen entries."""
        x = self._reshaped(x)
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
            self._cropped(
                d.new_zeros(framed)
                .flatten(2)
                .scatter_add_(2, index, d.reshape(index.shape))
                .view(framed)
            )
            for d in delta
        )
        return Delta(mean, var).through_(slope)

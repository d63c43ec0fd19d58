"""Layers that move a window over images: the arithmetic, what all share, and the pools."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.bayes.layers.base import BaseLayer, Shape, check_sizes
from unisono.bayes.moments import Delta, Moments
from unisono.errors import PartitionError


class WindowLayer(BaseLayer):
    """A square window over each image: kernel, stride, padding, and the sizes that follow."""

    info = "{name}({0.in_channels},{0.out_channels},{0.out_width},{0.out_height},{0.kernel_size})"

    def __init__(self, kernel_size: int, stride: int, padding: int, padding_type: int) -> None:
        super().__init__()
        check_sizes(self, kernel_size=kernel_size, stride=stride)
        check_sizes(self, 0, padding=padding)
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.padding_type = padding, padding_type
        self._declared = (0, 0, 0)
        """Channels, height and width of the image that the user gave; 0 where none."""
        self._image: tuple[int, int, int] | None = None

    def fixed_input(self) -> int | None:
        """The image it was told of, if any."""
        return self.in_channels * self.in_height * self.in_width or None

    def plan(self, shape: Shape | None) -> Shape | None:
        """Work out height and width of the output."""
        image = self._image_in(shape)
        if image is None:
            return None
        padded = {1: 2 * self.padding, 2: self.padding}.get(self.padding_type, 0)
        height = self._outputs(image[1], padded, "height")
        width = self._outputs(image[2], padded, "width")
        self._image = image
        channels = self.out_channels if self.params is not None else image[0]
        return self._set_shapes(image, (channels, height, width))

    def _outputs(self, size: int, padded: int, dim: str) -> int:
        """Return how many windows fit along one dim."""
        kernel, stride = self.kernel_size, self.stride
        free = size + padded - kernel
        if free >= 0 and free % stride == 0:
            return free // stride + 1
        if free < 0:
            wrong = f"{kernel} > {size} + {padded}: the kernel is larger than the image"
            hint = f"kernel_size={size + padded}, or more padding"
        else:
            below = size - free % stride
            wrong = f"({size} + {padded} - {kernel}) / {stride} is not whole"
            hint = (
                f"a {dim} of {below} or {below + stride}, or another kernel_size, stride or padding"
            )
        raise PartitionError.because(
            f"{self.get_layer_name()} with kernel_size={kernel}, stride={stride}",
            f"{dim} {size} and {padded} of padding",
            wrong,
            hint,
        )

    def _image_in(self, shape: Shape | None) -> tuple[int, int, int] | None:
        """Return `(channels, height, width)` of the image in a sample; None: not known yet."""
        channels, height, width = self._declared
        if (shape is None or len(shape) != 3) and not all(self._declared):
            channels, height, width = self.in_channels, self.in_height, self.in_width
        told = (channels, height, width) if height and width else None
        if shape is None:
            return told if channels else None
        info, size = self.get_layer_info(), math.prod(shape)
        if len(shape) == 3:
            found = (shape[0], shape[1], shape[2])
            if channels and found[0] != channels:
                raise PartitionError.because(
                    f"{info} reads {channels} channels",
                    f"an image of {found[0]} channels, {found[1]} x {found[2]}",
                    f"{found[0]} != {channels}",
                    f"in_channels={found[0]}",
                )
            if told is not None and found[1:] != told[1:]:
                raise PartitionError.because(
                    f"{info} was told in_height={height}, in_width={width}",
                    f"an image of height {found[1]} and width {found[2]}",
                    f"{found[1]} x {found[2]} != {height} x {width}",
                    f"in_height={found[1]}, in_width={found[2]}",
                )
            return found
        if told is None or not channels:
            side = math.isqrt(size // max(channels, 1))
            known = side if channels and channels * side * side == size else "..."
            images = "images as [batch, channels, height, width]"
            raise PartitionError.because(
                f"{info} needs the height and width of its image",
                f"a flat sample of {size} numbers",
                f"{size} = {channels or '?'} channels * height * width has many answers",
                f"in_width={known}, in_height={known}, or {images}",
            )
        wanted = math.prod(told)
        if wanted != size:
            raise PartitionError.because(
                f"{info} reads {channels} x {height} x {width} = {wanted} numbers per sample",
                f"a sample of {size}",
                f"{channels} * {height} * {width} = {wanted} != {size}",
                f"in_channels=, in_height=, in_width= that multiply to {size}, or another layer "
                "before",
            )
        return told

    def _images(self, x: Moments) -> Moments:
        return x.reshaped(x.mean.shape[0], *(self._image or x.mean.shape[1:]))

    @property
    def _sides(self) -> tuple[int, int]:
        """Entries that `_padded` adds before and behind each dim."""
        far = self.padding if self.padding_type in (1, 2) else 0
        return (far if self.padding_type == 1 else 0), far

    def _padded(self, x: Tensor, value: float = 0.0) -> Tensor:
        near, far = self._sides
        return F.pad(x, (near, far, near, far), value=value) if far else x

    def _cropped(self, x: Tensor) -> Tensor:
        """Undo `_padded`, for a delta."""
        near, far = self._sides
        return x[..., near : x.shape[-2] - far, near : x.shape[-1] - far] if far else x


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
        padding: width of the frame around the image, less than `kernel_size`.
        padding_type: 1 on all four sides, 2 on the right and the bottom only, else none.
    """

    def __init__(
        self, kernel_size: int, stride: int = 1, padding: int = 0, padding_type: int = 0
    ) -> None:
        stride = kernel_size if stride == -1 else stride
        super().__init__(kernel_size, stride, padding, padding_type)
        if max(self._sides) >= kernel_size:
            raise PartitionError.because(
                f"MaxPool2d(kernel_size={kernel_size}, padding={padding})",
                "windows that see nothing of the image",
                f"{padding} >= {kernel_size}",
                f"padding={kernel_size - 1}",
            )

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

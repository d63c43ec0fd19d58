"""Arithmetic of windows over images: pure, without tensors."""

from __future__ import annotations

import math

from unisono.errors import PartitionError


def alike(info: str, other: str) -> bool:
    """Compare infos without regard to case; an image size not known yet (0) matches any.

    >>> alike("Conv2d(1,2,0,0,3)", "conv2d(1,2,6,6,3)"), alike("Linear(1,2)", "Linear(1,3)")
    (True, False)
    """
    name, _, numbers = info.lower().rstrip(")").partition("(")
    other_name, _, other_numbers = other.lower().rstrip(")").partition("(")
    mine, theirs = numbers.split(","), other_numbers.split(",")
    if len(mine) != 5 or len(theirs) != 5:
        return info.lower() == other.lower()
    pairs = zip(mine, theirs, strict=True)
    return name == other_name and all(a == b or "0" in (a, b) for a, b in pairs)


def total_padding(padding: int, padding_type: int) -> int:
    """Return the zeros added along a dim: both sides (type 1), the far side (2), or none."""
    return {1: 2 * padding, 2: padding}.get(padding_type, 0)


def window_outputs(size: int, kernel: int, stride: int, padded: int, name: str, dim: str) -> int:
    """Return how many windows fit along one dim.

    >>> window_outputs(28, 4, 2, 2, "Conv2d", "width")
    14
    """
    free = size + padded - kernel
    sum_text = f"({size} + {padded} - {kernel})"
    if free < 0:
        raise PartitionError.because(
            f"{name} with kernel_size={kernel}, stride={stride}",
            f"{dim} {size} and {padded} of padding",
            f"{kernel} > {size} + {padded}: the kernel is larger than the image",
            f"kernel_size={size + padded}, or more padding",
        )
    if free % stride:
        below = size - free % stride
        raise PartitionError.because(
            f"{name} with kernel_size={kernel}, stride={stride}",
            f"{dim} {size} and {padded} of padding",
            f"{sum_text} / {stride} is not whole",
            f"a {dim} of {below} or {below + stride}, or another kernel_size, stride or padding",
        )
    return free // stride + 1


def spread_outputs(size: int, kernel: int, stride: int, padded: int, name: str, dim: str) -> int:
    """Return the length of a transposed convolution's output along one dim.

    >>> spread_outputs(14, 4, 2, 2, "ConvTranspose2d", "width")
    28
    """
    length = stride * (size - 1) + kernel - padded
    if length < 1:
        raise PartitionError.because(
            f"{name} with kernel_size={kernel}, stride={stride}",
            f"{dim} {size} and {padded} cut off",
            f"{stride} * ({size} - 1) + {kernel} - {padded} = {length}",
            "less padding",
        )
    return length


def image_shape(
    shape: tuple[int, ...] | None, channels: int, height: int, width: int, info: str
) -> tuple[int, int, int] | None:
    """Return `(channels, height, width)` of the image that a spatial layer is given.

    Args:
        shape: of one sample, None where it is not known yet.
        channels: that the layer expects; 0 takes what comes.
        height: that the layer was told; 0 for none.
        width: that the layer was told; 0 for none.
        info: the layer, for messages.
    """
    told = (channels, height, width) if height and width else None
    if shape is None:
        return told if channels else None
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
    size = math.prod(shape)
    if told is None or not channels:
        side = math.isqrt(size // max(channels, 1))
        known = side if channels and channels * side * side == size else "..."
        raise PartitionError.because(
            f"{info} needs the height and width of its image",
            f"a flat sample of {size} numbers",
            f"{size} = {channels or '?'} channels * height * width has many answers",
            f"in_width={known}, in_height={known}, or images as [batch, channels, height, width]",
        )
    if math.prod(told) != size:
        raise PartitionError.because(
            f"{info} reads {channels} x {height} x {width} = {math.prod(told)} numbers a sample",
            f"a sample of {size}",
            f"{channels} * {height} * {width} = {math.prod(told)} != {size}",
            f"in_channels=, in_height=, in_width= that multiply to {size}, or another layer before",
        )
    return told

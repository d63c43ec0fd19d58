"""`DistributedConv1d/2d/3d`: the convolution that fits the partitions it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from unisono.errors import PartitionError
from unisono.nn.conv_feature import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
)
from unisono.nn.conv_general import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from unisono.nn.module import Module
from unisono.topology import Partition

__all__ = ["DistributedConv1d", "DistributedConv2d", "DistributedConv3d"]

_KINDS: dict[int, tuple[Callable[..., Module], ...]] = {
    1: (DistributedFeatureConv1d, DistributedChannelConv1d, DistributedGeneralConv1d),
    2: (DistributedFeatureConv2d, DistributedChannelConv2d, DistributedGeneralConv2d),
    3: (DistributedFeatureConv3d, DistributedChannelConv3d, DistributedGeneralConv3d),
}


def choose(
    dims: int,
    kinds: Sequence[Callable[..., Module]],
    P_x: Partition,
    P_y: Partition | None,
    P_w: Partition | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Module:
    """Return one of three kinds (feature, channel, general), made with the partitions it takes."""
    feature, channel, general = kinds
    if P_y is None and P_w is None:
        return feature(P_x, *args, **kwargs)
    if P_y is None or P_w is None:
        raise PartitionError.because(
            f"DistributedConv{dims}d",
            f"P_x={P_x!r}, P_y={P_y!r}, P_w={P_w!r}",
            "P_x alone, or all three",
            "leave P_y and P_w out, or give both",
        )
    is_unsplit = math.prod(P_x.shape[2:]) == math.prod(P_y.shape[2:]) == 1
    return (channel if is_unsplit else general)(P_x, P_y, P_w, *args, **kwargs)


def DistributedConv1d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 1-d convolution for these partitions: feature, channel or general."""
    return choose(1, _KINDS[1], P_x, P_y, P_w, args, kwargs)


def DistributedConv2d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 2-d convolution for these partitions: feature, channel or general."""
    return choose(2, _KINDS[2], P_x, P_y, P_w, args, kwargs)


def DistributedConv3d(
    P_x: Partition,
    P_y: Partition | None = None,
    P_w: Partition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 3-d convolution for these partitions: feature, channel or general."""
    return choose(3, _KINDS[3], P_x, P_y, P_w, args, kwargs)

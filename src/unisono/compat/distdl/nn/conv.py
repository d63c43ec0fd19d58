"""DistDL's `nn.conv`: the convolution that fits the partitions it is given."""

from __future__ import annotations

from typing import Any

from unisono.nn.conv import choose
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .conv_channel import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
)
from .conv_feature import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
)
from .conv_general import (
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from .module import Module

__all__ = ["DistributedConv1d", "DistributedConv2d", "DistributedConv3d"]

AnyPartition = MPIPartition | Partition
_KINDS = {
    1: (DistributedFeatureConv1d, DistributedChannelConv1d, DistributedGeneralConv1d),
    2: (DistributedFeatureConv2d, DistributedChannelConv2d, DistributedGeneralConv2d),
    3: (DistributedFeatureConv3d, DistributedChannelConv3d, DistributedGeneralConv3d),
}


def _chosen(
    dims: int,
    P_x: AnyPartition,
    P_y: AnyPartition | None,
    P_w: AnyPartition | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    outputs, weights = (None if P is None else layout_of(P) for P in (P_y, P_w))
    return choose(dims, _KINDS[dims], layout_of(P_x), outputs, weights, args, kwargs)


def DistributedConv1d(
    P_x: AnyPartition,
    P_y: AnyPartition | None = None,
    P_w: AnyPartition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 1-d convolution for these partitions: feature, channel or general."""
    return _chosen(1, P_x, P_y, P_w, args, kwargs)


def DistributedConv2d(
    P_x: AnyPartition,
    P_y: AnyPartition | None = None,
    P_w: AnyPartition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 2-d convolution for these partitions: feature, channel or general."""
    return _chosen(2, P_x, P_y, P_w, args, kwargs)


def DistributedConv3d(
    P_x: AnyPartition,
    P_y: AnyPartition | None = None,
    P_w: AnyPartition | None = None,
    *args: Any,
    **kwargs: Any,
) -> Module:
    """Return the 3-d convolution for these partitions: feature, channel or general."""
    return _chosen(3, P_x, P_y, P_w, args, kwargs)

"""DistDL's `nn.mixins`: the arithmetic of halos, for layers of one's own. All pure."""

from __future__ import annotations

from . import conv_mixin, halo_mixin, interpolate_mixin, pooling_mixin
from .conv_mixin import ConvMixin
from .halo_mixin import HaloMixin
from .interpolate_mixin import InterpolateMixin
from .pooling_mixin import PoolingMixin

__all__ = [
    "ConvMixin",
    "HaloMixin",
    "InterpolateMixin",
    "PoolingMixin",
    "conv_mixin",
    "halo_mixin",
    "interpolate_mixin",
    "pooling_mixin",
]

"""DistDL's `nn.mixins.pooling_mixin`: the inputs under an output of a pooling."""

from __future__ import annotations

from .conv_mixin import ConvMixin


class PoolingMixin(ConvMixin):
    """First and last input that an output reads: the same as those of a convolution."""

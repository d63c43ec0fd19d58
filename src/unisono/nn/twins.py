"""Which distributed layer stands for which layer of torch, and what needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from unisono.nn.batch_norm import DistributedBatchNorm
from unisono.nn.conv_feature import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
)
from unisono.nn.conv_transpose import (
    DistributedFeatureConvTranspose1d,
    DistributedFeatureConvTranspose2d,
    DistributedFeatureConvTranspose3d,
)
from unisono.nn.distribute_checks import INSTANCE_NORMS, torch_kind
from unisono.nn.global_pool import GlobalAvgPool
from unisono.nn.group_norm import DistributedGroupNorm
from unisono.nn.halo_layers import DistributedPad
from unisono.nn.instance_norm import DistributedInstanceNorm
from unisono.nn.layer_norm import DistributedLayerNorm
from unisono.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from unisono.nn.upsampling import DistributedUpsample
from unisono.topology import Partition

_CONVS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv1d: DistributedFeatureConv1d,
    nn.Conv2d: DistributedFeatureConv2d,
    nn.Conv3d: DistributedFeatureConv3d,
}
_TRANSPOSED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.ConvTranspose1d: DistributedFeatureConvTranspose1d,
    nn.ConvTranspose2d: DistributedFeatureConvTranspose2d,
    nn.ConvTranspose3d: DistributedFeatureConvTranspose3d,
}
_MAX_POOLS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.MaxPool1d: DistributedMaxPool1d,
    nn.MaxPool2d: DistributedMaxPool2d,
    nn.MaxPool3d: DistributedMaxPool3d,
}
_AVG_POOLS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.AvgPool1d: DistributedAvgPool1d,
    nn.AvgPool2d: DistributedAvgPool2d,
    nn.AvgPool3d: DistributedAvgPool3d,
}
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_PADS: dict[type[nn.Module], str] = {
    nn.ZeroPad1d: "constant",
    nn.ZeroPad2d: "constant",
    nn.ZeroPad3d: "constant",
    nn.ConstantPad1d: "constant",
    nn.ConstantPad2d: "constant",
    nn.ConstantPad3d: "constant",
    nn.ReflectionPad1d: "reflect",
    nn.ReflectionPad2d: "reflect",
    nn.ReflectionPad3d: "reflect",
    nn.ReplicationPad1d: "replicate",
    nn.ReplicationPad2d: "replicate",
    nn.ReplicationPad3d: "replicate",
    nn.CircularPad1d: "circular",
    nn.CircularPad2d: "circular",
    nn.CircularPad3d: "circular",
}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.Hardshrink, nn.Softshrink, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
SPATIAL: frozenset[type[nn.Module]] = frozenset(
    kind
    for kinds in (
        *(_CONVS, _TRANSPOSED, _MAX_POOLS, _AVG_POOLS, _ADAPTIVE),
        *(NORMS, INSTANCE_NORMS, _PADS),
    )
    for kind in kinds
) - {nn.BatchNorm1d} | {nn.GroupNorm, nn.Upsample}


def twin_of(module: nn.Module, P: Partition) -> nn.Module | None:
    """Return the split twin of a layer, or None if there is none."""
    m = cast("Any", module)
    kind = torch_kind(module) or nn.Module
    parameters = next(module.parameters(), None)
    like: dict[str, Any] = {}
    if parameters is not None:
        like = {"device": parameters.device, "dtype": parameters.dtype}
    if kind in _CONVS:
        return _CONVS[kind](
            P, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding, m.padding_mode,
            m.dilation, m.groups, m.bias is not None, **like,
        )  # fmt: skip
    if kind in _TRANSPOSED:
        return _TRANSPOSED[kind](
            P, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
            m.output_padding, m.groups, m.bias is not None, m.dilation, **like,
        )  # fmt: skip
    if kind in _MAX_POOLS:
        return _MAX_POOLS[kind](
            P, m.kernel_size, m.stride, m.padding, m.dilation, m.return_indices, m.ceil_mode
        )
    if kind in _AVG_POOLS:
        more = {} if kind is nn.AvgPool1d else {"divisor_override": m.divisor_override}
        return _AVG_POOLS[kind](
            P, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, **more
        )
    if kind in _ADAPTIVE and _is_one(m.output_size):
        return GlobalAvgPool(P)
    if kind in NORMS:
        return DistributedBatchNorm(
            P, m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats,
            bias=m.bias is not None, **like,
        )  # fmt: skip
    if kind is nn.LayerNorm:
        return DistributedLayerNorm(
            P, m.normalized_shape, m.eps, m.elementwise_affine, m.bias is not None, **like
        )
    if kind is nn.GroupNorm:
        return DistributedGroupNorm(
            P, m.num_groups, m.num_channels, m.eps, m.affine, bias=m.bias is not None, **like
        )
    if kind in INSTANCE_NORMS:
        return DistributedInstanceNorm(
            P, m.num_features, m.eps, m.momentum, m.affine, m.track_running_stats,
            bias=m.bias is not None, **like,
        )  # fmt: skip
    if kind in _PADS:  # balanced, as behind a convolution: a skip of that size then fits
        value = getattr(m, "value", 0.0)
        return DistributedPad(P, m.padding, _PADS[kind], value, balance=True)
    if issubclass(kind, nn.Upsample):
        return DistributedUpsample(P, m.size, m.scale_factor, m.mode, m.align_corners)
    return None


def _is_one(size: object) -> bool:
    return size == 1 or (isinstance(size, tuple | list) and all(n == 1 for n in size))

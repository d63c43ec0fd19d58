"""Layers of torch: which distributed layer stands for which, and what must not be split.

A split network does what the classes of its layers say. Hooks, replaced forwards and computed
weights do more than that, so they are refused with their path instead of being lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from unisono.errors import PartitionError, an
from unisono.nn.layers.batch_norm import DistributedBatchNorm
from unisono.nn.layers.conv import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
)
from unisono.nn.layers.conv_transpose import (
    DistributedFeatureConvTranspose1d,
    DistributedFeatureConvTranspose2d,
    DistributedFeatureConvTranspose3d,
)
from unisono.nn.layers.halo import DistributedPad
from unisono.nn.layers.norm import (
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
)
from unisono.nn.layers.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
    GlobalAvgPool,
)
from unisono.nn.layers.upsampling import DistributedUpsample
from unisono.nn.module import Module
from unisono.topology import Partition

INSTANCE_NORMS: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}
"""With the dims of an input of several samples."""
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


# What must not be split.

_CALL_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_STATE_HOOKS = {
    "_state_dict_pre_hooks": "state_dict pre-hook",
    "_state_dict_hooks": "state_dict hook",
    "_load_state_dict_pre_hooks": "load_state_dict pre-hook",
    "_load_state_dict_post_hooks": "load_state_dict post-hook",
}
_HARMLESS = frozenset({"extra_repr", "reset_parameters"})
_SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin)


def refuse(path: str, module: nn.Module, reason: str, hint: str) -> NoReturn:
    """Refuse a module of a network, by its path."""
    where = f"distribute: {path or 'the module'} is {an(type(module).__name__)}"
    raise PartitionError.because(where, reason, None, hint)


def torch_base(module: nn.Module) -> type[nn.Module]:
    """Return the class of torch that a module is, or is derived from."""
    return next(kind for kind in type(module).__mro__ if _is_of_torch(kind))


def torch_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch whose work a module does; None if it does some work of its own.

    A subclass that only fills in arguments does the work of its base.
    """
    base = torch_base(module)
    ours = type(module).__mro__[: type(module).__mro__.index(base)]
    written = {name for kind in ours for name in vars(kind)}
    inner = {name for name in written if not name.startswith("__") or name == "__call__"}
    return None if (inner & set(dir(base))) - _HARMLESS else base


def check_copies(module: nn.Module) -> None:
    """Refuse what a copy of a network would lose."""
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                hint = "torch.nn.utils.parametrizations, behind the Flatten; or the plain layer"
                refuse(path, layer, f"its {name} is computed before each call", hint)
        for name, p in layer.named_parameters(recurse=False):
            if is_lazy(p):
                refuse(path, layer, f"its {name} has no shape yet", "call the network once, before")
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                hint = "register it on the parameters of the network that distribute returns"
                refuse(path, layer, f"its {name} has a hook, which a copy does not have", hint)


def check_carries_nothing(module: nn.Module, path: str) -> None:
    """Refuse work that is attached to a module of the split part and not said by its class."""
    if isinstance(module, Module):
        return
    if is_parametrized(module):
        hint = "torch.nn.utils.parametrize.remove_parametrizations before, or behind the Flatten"
        refuse(path, module, "its parameters are computed by parametrizations", hint)
    if "forward" in vars(module):
        hint = "distribute the plain network first; write a class with that forward"
        refuse(path, module, "its forward has been replaced on the object (torch.compile?)", hint)
    _check_hooks(module, path, _CALL_HOOKS | _STATE_HOOKS)


def check_takes_samples(module: nn.Module, path: str, dims: int) -> None:
    """Refuse a layer that takes a tensor of so many dims for a single sample, or not at all."""
    kind = torch_kind(module) or nn.Module
    wanted = 5 if kind is nn.Dropout3d and dims == 4 else INSTANCE_NORMS.get(kind, dims)
    if wanted != dims:
        reason = f"it takes samples of {wanted} dims, batch and channels too, and {dims} are cut"
        hint = f"{torch_base(module).__name__[:-2]}{dims - 2}d, or a partition of {wanted} dims"
        refuse(path, module, reason, hint)


def _check_hooks(module: nn.Module, path: str, hooks: dict[str, str]) -> None:
    for attribute, kind in hooks.items():
        if getattr(module, attribute, None):
            hint = "register it on the module that distribute returns, where it sees own blocks"
            why = f"it has {an(kind)}, and nobody knows whether that may be cut"
            refuse(path, module, why, hint)


def check_keeps_samples_apart(module: nn.Module, path: str, *, trusts: bool, dim: int) -> None:
    """Refuse layers of a head on own samples that look at other samples too.

    Args:
        module: of the head.
        path: of the module.
        trusts: whether forwards of their own, and what they call, may do what they like.
        dim: how many dims the input has, 0 if nobody knows.
    """
    _check_hooks(module, path, _CALL_HOOKS)
    if torch_kind(module) is nn.Sequential:
        for name, child in module._modules.items():
            if child is not None:
                where = f"{path}.{name}".lstrip(".")
                check_keeps_samples_apart(child, where, trusts=trusts, dim=dim)
                dim = 0
        return
    is_written = torch_kind(module) is None and not is_parametrized(module)
    if is_written or "forward" in vars(module):
        if trusts:
            return
        hint = 'custom="recurse" if its forward keeps samples apart, or head="replicate"'
        refuse(path, module, "it has a forward of its own", hint)
    reason = _mixing(module, dim)
    if reason is not None:
        refuse(path, module, f'{reason}; head="batch" gives a rank some', 'head="replicate"')


def _mixing(module: nn.Module, dim: int) -> str | None:
    """Return why a layer of torch needs all samples at once, or None."""
    m = cast("Any", module)
    if isinstance(module, _SOFTMAXES):
        at = m.dim
        return None if at is not None and (at >= 1 or at == -1) else f"dim {at} may be the samples"
    if isinstance(module, nn.Flatten):
        start = m.start_dim + dim if m.start_dim < 0 else m.start_dim
        return None if start >= 1 or m.start_dim == -1 else "it joins the samples"
    if isinstance(module, nn.Unflatten):
        known = isinstance(m.dim, int) and (m.dim >= 1 or m.dim == -1)
        return None if known else f"dim {m.dim} may be the samples"
    if isinstance(module, tuple(INSTANCE_NORMS)) and m.track_running_stats:
        return "its running statistics are those of all samples"
    for layer in module.modules():
        if getattr(layer, "batch_first", True) is False:
            return "its samples are in dim 1 (batch_first=False)"
    return None


def _is_of_torch(kind: type) -> bool:
    return issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.modules.")

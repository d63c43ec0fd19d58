"""Between `torch.nn` and Bayesian nets: weights become means, and means become weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from unisono.bayes.layers import activation
from unisono.bayes.layers.base import BaseLayer
from unisono.bayes.layers.convolution import Conv2d, ConvTranspose2d
from unisono.bayes.layers.linear import Linear
from unisono.bayes.layers.normalization import BatchNorm2d, LayerNorm, RMSNorm
from unisono.bayes.layers.window import AvgPool2d, MaxPool2d, WindowLayer
from unisono.bayes.moments import check_variance
from unisono.bayes.sequential import Sequential
from unisono.errors import PartitionError, UnisonoError

KNOWN = "Linear, Conv2d, ConvTranspose2d, pools, ReLU, Tanh, Sigmoid, BatchNorm2d, RMSNorm"
_ACTIVATIONS: dict[type[BaseLayer], type[nn.Module]] = {
    activation.ReLU: nn.ReLU,
    activation.Tanh: nn.Tanh,
    activation.Sigmoid: nn.Sigmoid,
}
_CONVOLUTIONS: dict[type[Conv2d | ConvTranspose2d], type[nn.Conv2d | nn.ConvTranspose2d]] = {
    Conv2d: nn.Conv2d,
    ConvTranspose2d: nn.ConvTranspose2d,
}
_POOLS: dict[type[AvgPool2d | MaxPool2d], type[nn.AvgPool2d | nn.MaxPool2d]] = {
    AvgPool2d: nn.AvgPool2d,
    MaxPool2d: nn.MaxPool2d,
}
_ONLY: dict[type[nn.Module], dict[str, tuple[object, ...]]] = {
    nn.Conv2d: {"padding_mode": ("zeros",), "groups": (1,), "dilation": ((1, 1),)},
    nn.ConvTranspose2d: {"output_padding": ((0, 0), 0), "groups": (1,), "dilation": ((1, 1),)},
    nn.AvgPool2d: {"ceil_mode": (False,), "divisor_override": (None,)},
    nn.MaxPool2d: {"dilation": (1, (1, 1)), "ceil_mode": (False,), "return_indices": (False,)},
    nn.BatchNorm1d: {"affine": (True,), "track_running_stats": (True,)},
    nn.BatchNorm2d: {"affine": (True,), "track_running_stats": (True,)},
    nn.RMSNorm: {"elementwise_affine": (True,)},
    nn.Flatten: {"start_dim": (1,), "end_dim": (-1,)},
}
"""Settings of torch layers that have a counterpart here; others would change the numbers."""


@torch.no_grad()
def from_torch(module: nn.Module, var: float | None = None) -> Sequential:
    """Return a Bayesian net whose means are the weights of a torch module.

    Args:
        module: an `nn.Sequential` (nested ones are unrolled) of Linear, convolutions, pools, ReLU,
            Tanh, Sigmoid, batch and RMS norms; Flatten and Dropout are left out. A module of
            float64 gives a net of float64. Settings without a counterpart are refused by name.
        var: variance of every weight and bias; None keeps each layer's start variance.
    """
    if var is not None:
        check_variance(torch.tensor(var), "var")
    pairs = [(part, layer) for part in _unrolled(module) if (layer := _layer_of(part)) is not None]
    net = Sequential(*(layer for _, layer in pairs))
    if any(p.dtype == torch.float64 for p in module.parameters()):
        net.double()
    for part, layer in pairs:
        _fill(layer, part, var)
    return net


def _fill(layer: BaseLayer, part: nn.Module, var: float | None) -> None:
    tensors = layer.tensors()
    if not tensors:
        return
    tensors["mu_w"].copy_(part.get_parameter("weight"))
    bias = getattr(part, "bias", None)
    if bias is not None:
        tensors["mu_b"].copy_(bias)
    if var is not None:
        tensors["var_w"].fill_(var)
        tensors["var_b"].fill_(var)
    if isinstance(layer, BatchNorm2d):
        layer.running_mean.copy_(part.get_buffer("running_mean"))
        layer.running_var.copy_(part.get_buffer("running_var"))
        layer.has_statistics = True


def _unrolled(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for part in module:
            yield from _unrolled(part)
    else:
        yield module


def _layer_of(part: nn.Module) -> BaseLayer | None:
    _check_settings(part)
    if isinstance(part, nn.Flatten | nn.Dropout | nn.Identity):
        return None
    for kind, module in _ACTIVATIONS.items():
        if type(part) is module:
            return kind()
    for kind, module in _CONVOLUTIONS.items():
        if isinstance(part, module):
            sizes = (part.in_channels, part.out_channels, _one(part, "kernel_size"))
            return kind(*sizes, part.bias is not None, _one(part, "stride"), _one(part, "padding"))
    for kind, module in _POOLS.items():
        if isinstance(part, module):
            sides = _one(part, "kernel_size"), _one(part, "stride"), _one(part, "padding")
            return kind(*sides, padding_type=1)
    if isinstance(part, nn.Linear):
        return Linear(part.in_features, part.out_features, part.bias is not None)
    if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
        old = 1 - (0.1 if part.momentum is None else part.momentum)
        return BatchNorm2d(part.num_features, part.eps, old)
    if isinstance(part, nn.RMSNorm) and len(part.normalized_shape) == 1:
        eps = torch.finfo(part.weight.dtype).eps if part.eps is None else part.eps
        return RMSNorm(list(part.normalized_shape), eps)
    raise PartitionError.because(
        f"from_torch of {type(part).__name__}",
        "it has no counterpart in unisono.bayes",
        hint=f"layers of {KNOWN}",
    )


def _check_settings(part: nn.Module) -> None:
    """Refuse settings that a layer here cannot express."""
    for kind, settings in _ONLY.items():
        if isinstance(part, kind):
            for name, allowed in settings.items():
                if getattr(part, name) not in allowed:
                    raise _unknown_setting(part, name, f"{name}={allowed[-1]!r}")
    excluded = isinstance(part, nn.AvgPool2d) and not part.count_include_pad
    if excluded and part.padding not in (0, (0, 0)):
        raise _unknown_setting(part, "count_include_pad", "count_include_pad=True, or padding=0")


def _one(part: nn.Module, name: str) -> int:
    """Return the number of a square setting such as `(2, 2)`."""
    value = getattr(part, name)
    numbers = set(value) if isinstance(value, tuple) else {value}
    first = next(iter(numbers))
    if len(numbers) != 1 or not isinstance(first, int):
        raise _unknown_setting(part, name, f"one number for {name}: windows are square")
    return first


def _unknown_setting(part: nn.Module, name: str, hint: str) -> UnisonoError:
    return PartitionError.because(
        f"from_torch of {type(part).__name__}({name}={getattr(part, name)!r})",
        "unisono.bayes has no layer of the same numbers",
        hint=hint,
    )


@torch.no_grad()
def to_torch(net: Sequential) -> nn.Sequential:
    """Return the means of `net` as a torch module in eval mode; later changes are not shared.

    Linear, convolutions, pools, ReLU, Tanh, Sigmoid, BatchNorm2d and RMSNorm are known. LayerNorm
    has no twin: it divides by n - 1 and counts the variances of its units.
    """
    modules: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):  # torch draws start values that are written over
        for n, layer in enumerate(net.layers):
            if isinstance(layer, Linear) and n and not isinstance(modules[-1], nn.Flatten):
                modules.append(nn.Flatten())
            modules += _modules_of(layer, n)
    return nn.Sequential(*modules).to(device=net.device, dtype=net._dtype).eval()


def _modules_of(layer: BaseLayer, n: int) -> list[nn.Module]:
    for kind, module in _ACTIVATIONS.items():
        if type(layer) is kind:
            return [module()]
    if isinstance(layer, Linear):
        return [_filled(nn.Linear(layer.input_size, layer.output_size, layer.bias), layer)]
    for kind, module in _CONVOLUTIONS.items():
        if isinstance(layer, kind):
            sizes = (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride)
            return [_filled(module(*sizes, _padding(layer, n), bias=layer.bias), layer)]
    for kind, module in _POOLS.items():
        if isinstance(layer, kind):
            return [module(layer.kernel_size, layer.stride, _padding(layer, n))]
    if isinstance(layer, BatchNorm2d):
        kind = nn.BatchNorm2d if layer.out_width else nn.BatchNorm1d
        module = kind(layer.num_features, layer.eps, 1 - layer.momentum)
        running = module.running_mean, module.running_var
        for target, value in zip(running, (layer.running_mean, layer.running_var), strict=True):
            if target is not None:
                target.copy_(value)
        return [_filled(module, layer)]
    if isinstance(layer, RMSNorm):
        return _root_mean_square(layer)
    raise _no_twin(layer, n)


def _root_mean_square(layer: RMSNorm) -> list[nn.Module]:
    """Return the norm over pieces of a flat sample, in the shape that came."""
    norm = _filled(nn.RMSNorm(layer.num_features, layer.eps), layer)
    modules: list[nn.Module] = [nn.Flatten()]
    if layer.input_size != layer.num_features:  # several pieces, or not known yet
        modules += [nn.Unflatten(1, (-1, layer.num_features)), norm, nn.Flatten()]
    else:
        modules.append(norm)
    if layer.in_width:
        image = (layer.in_channels, layer.in_height, layer.in_width)
        modules.append(nn.Unflatten(1, image))
    return modules


def _padding(layer: WindowLayer, n: int) -> int:
    if layer.padding_type == 2 and layer.padding:
        raise PartitionError.because(
            f"to_torch of layer {n}, {layer.get_layer_info()} with padding_type=2",
            "torch.nn pads both sides alike",
            hint="padding_type=1, or nn.ZeroPad2d by hand before the layer's twin",
        )
    return layer.padding if layer.padding_type == 1 else 0


def _filled(module: nn.Module, layer: BaseLayer) -> nn.Module:
    tensors = layer.tensors()
    module.to(tensors["mu_w"].dtype)
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    weight.copy_(tensors["mu_w"])
    if bias is not None:
        bias.copy_(tensors["mu_b"] if tensors["mu_b"].numel() else torch.zeros_like(bias))
    return module


def _no_twin(layer: BaseLayer, n: int) -> UnisonoError:
    why, hint = "torch.nn has no layer of the same numbers", f"layers of {KNOWN}"
    if isinstance(layer, LayerNorm):
        why = "it divides by n - 1 and counts the variances of its units; nn.LayerNorm does not"
        hint = "BatchNorm2d or RMSNorm, which have exact twins"
    return PartitionError.because(
        f"to_torch of layer {n}, {layer.get_layer_info()}", why, hint=hint
    )

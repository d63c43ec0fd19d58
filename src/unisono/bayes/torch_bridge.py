"""From a Bayesian net to `torch.nn` and back: means become weights, weights become means."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from unisono.bayes import activation, convolution, linear, normalization, pooling
from unisono.bayes.arrays import check_variance
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.sequential import Sequential
from unisono.errors import PartitionError

_ACTIVATIONS: dict[type[BaseLayer], type[nn.Module]] = {
    activation.ReLU: nn.ReLU,
    activation.Tanh: nn.Tanh,
    activation.Sigmoid: nn.Sigmoid,
}


@torch.no_grad()
def to_torch(net: Sequential) -> nn.Sequential:
    """Return the means of `net` as a torch module in eval mode; later changes are not shared.

    Linear, convolutions, pools, ReLU, Tanh, Sigmoid and norms are known.
    """
    modules: list[nn.Module] = []
    for n, layer in enumerate(net.layers):
        if isinstance(layer, linear.Linear) and n and not isinstance(modules[-1], nn.Flatten):
            modules.append(nn.Flatten())
        modules.append(_module_of(layer, n))
    return nn.Sequential(*modules).to(device=net.device, dtype=net._dtype).eval()


def _module_of(layer: BaseLayer, n: int) -> nn.Module:
    for kind, module in _ACTIVATIONS.items():
        if type(layer) is kind:
            return module()
    if isinstance(layer, convolution.Conv2d | convolution.ConvTranspose2d):
        if layer.padding_type == 2 and layer.padding:
            raise _unknown(f"layer {n}, {layer.get_layer_info()} with padding_type=2", "torch.nn")
        padding = layer.padding if layer.padding_type == 1 else 0
        kind = nn.ConvTranspose2d if layer.transposed else nn.Conv2d
        sizes = (layer.in_channels, layer.out_channels, layer.kernel_size)
        return _filled(kind(*sizes, layer.stride, padding, bias=layer.bias), layer)
    if isinstance(layer, linear.Linear):
        module = nn.Linear(layer.input_size, layer.output_size, layer.bias)
        return _filled(module, layer)
    if isinstance(layer, pooling.AvgPool2d | pooling.MaxPool2d) and layer.padding_type != 2:
        kind = nn.AvgPool2d if isinstance(layer, pooling.AvgPool2d) else nn.MaxPool2d
        return kind(layer.kernel_size, layer.stride, layer.padding if layer.padding_type else 0)
    if isinstance(layer, normalization.BatchNorm2d):
        kind = nn.BatchNorm2d if layer.out_width else nn.BatchNorm1d
        module = kind(layer.num_features, layer.eps, 1 - layer.momentum)
        running = module.running_mean, module.running_var
        for target, value in zip(running, (layer.running_mean, layer.running_var), strict=True):
            if target is not None:
                target.copy_(value)
        return _filled(module, layer)
    raise _unknown(f"layer {n}, {layer.get_layer_info()}", "torch.nn")


def _filled(module: nn.Module, layer: BaseLayer) -> nn.Module:
    tensors = layer.tensors()
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    weight.copy_(tensors["mu_w"])
    if bias is not None:
        bias.copy_(tensors["mu_b"] if tensors["mu_b"].numel() else torch.zeros_like(bias))
    return module


@torch.no_grad()
def from_torch(module: nn.Module, var: float | None = None) -> Sequential:
    """Return a Bayesian net whose means are the weights of a torch module.

    Args:
        module: an `nn.Sequential` (nested ones are unrolled) of Linear, convolutions, pools, ReLU,
            Tanh, Sigmoid and batch norms; Flatten and Dropout are left out.
        var: variance of every weight and bias; None keeps each layer's start variance.
    """
    if var is not None:
        check_variance(torch.tensor(var), "var")
    layers: list[BaseLayer] = []
    for part in _unrolled(module):
        layer = _layer_of(part)
        if layer is None:
            continue
        layers.append(layer)
        tensors = layer.tensors()
        if tensors:
            tensors["mu_w"].copy_(part.get_parameter("weight"))
            bias = getattr(part, "bias", None)
            if bias is not None:
                tensors["mu_b"].copy_(bias)
            if var is not None:
                tensors["var_w"].fill_(var)
                tensors["var_b"].fill_(var)
    return Sequential(*layers)


def _unrolled(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for part in module:
            yield from _unrolled(part)
    else:
        yield module


def _layer_of(part: nn.Module) -> BaseLayer | None:
    if isinstance(part, nn.Flatten | nn.Dropout | nn.Identity):
        return None
    for kind, module in _ACTIVATIONS.items():
        if type(part) is module:
            return kind()
    if isinstance(part, nn.Linear):
        return linear.Linear(part.in_features, part.out_features, part.bias is not None)
    if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
        square = {part.kernel_size[0], *part.kernel_size}
        if len(square) == 1 and part.groups == 1 and set(part.dilation) == {1}:
            kind = (
                convolution.Conv2d if isinstance(part, nn.Conv2d) else convolution.ConvTranspose2d
            )
            return kind(
                part.in_channels,
                part.out_channels,
                part.kernel_size[0],
                part.bias is not None,
                _one(part.stride),
                _one(part.padding),
            )
    if isinstance(part, nn.AvgPool2d | nn.MaxPool2d):
        kind = pooling.AvgPool2d if isinstance(part, nn.AvgPool2d) else pooling.MaxPool2d
        return kind(_one(part.kernel_size), _one(part.stride), _one(part.padding), 1)
    if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) and part.affine:
        norm = normalization.BatchNorm2d(
            part.num_features, part.eps, 1 - (0.1 if part.momentum is None else part.momentum)
        )
        if part.running_mean is not None and part.running_var is not None:
            norm.running_mean.copy_(part.running_mean)
            norm.running_var.copy_(part.running_var)
            norm.has_statistics = True
        return norm
    raise _unknown(type(part).__name__, "unisono.bayes")


def _one(value: object) -> int:
    """Return the number of a square setting such as `(2, 2)`."""
    numbers = set(value) if isinstance(value, tuple) else {value}
    first = next(iter(numbers))
    if len(numbers) != 1 or not isinstance(first, int):
        raise _unknown(f"a setting of {value}", "unisono.bayes, whose windows are square")
    return first


def _unknown(what: str, where: str) -> PartitionError:
    return PartitionError.because(  # type: ignore[return-value]
        what,
        f"it has no counterpart in {where}",
        None,
        "Linear, Conv2d, pools, ReLU, Tanh, Sigmoid, norms",
    )

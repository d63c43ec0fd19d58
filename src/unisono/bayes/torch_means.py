"""The means of a Bayesian net as a `torch.nn` module."""

from __future__ import annotations

import torch
from torch import nn

from unisono.bayes import activation, convolution, linear, normalization, pooling
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.stack import LayerStack
from unisono.errors import PartitionError

KNOWN = "Linear, Conv2d, ConvTranspose2d, pools, ReLU, Tanh, Sigmoid, BatchNorm2d, RMSNorm"
ACTIVATIONS: dict[type[BaseLayer], type[nn.Module]] = {
    activation.ReLU: nn.ReLU,
    activation.Tanh: nn.Tanh,
    activation.Sigmoid: nn.Sigmoid,
}


@torch.no_grad()
def to_torch(net: LayerStack) -> nn.Sequential:
    """Return the means of `net` as a torch module in eval mode; later changes are not shared.

    Linear, convolutions, pools, ReLU, Tanh, Sigmoid, BatchNorm2d and RMSNorm are known. LayerNorm
    has no twin: it divides by n - 1 and counts the variances of its units.
    """
    modules: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):  # torch draws start values that are written over
        for n, layer in enumerate(net.layers):
            if isinstance(layer, linear.Linear) and n and not isinstance(modules[-1], nn.Flatten):
                modules.append(nn.Flatten())
            modules += _modules_of(layer, n)
    return nn.Sequential(*modules).to(device=net.device, dtype=net._dtype).eval()


def _modules_of(layer: BaseLayer, n: int) -> list[nn.Module]:
    for kind, module in ACTIVATIONS.items():
        if type(layer) is kind:
            return [module()]
    if isinstance(layer, linear.Linear):
        return [_filled(nn.Linear(layer.input_size, layer.output_size, layer.bias), layer)]
    if isinstance(layer, convolution.Conv2d | convolution.ConvTranspose2d):
        padding = _padding(layer, n)
        kind = nn.ConvTranspose2d if layer.transposed else nn.Conv2d
        sizes = (layer.in_channels, layer.out_channels, layer.kernel_size)
        return [_filled(kind(*sizes, layer.stride, padding, bias=layer.bias), layer)]
    if isinstance(layer, pooling.AvgPool2d | pooling.MaxPool2d):
        kind = nn.AvgPool2d if isinstance(layer, pooling.AvgPool2d) else nn.MaxPool2d
        return [kind(layer.kernel_size, layer.stride, _padding(layer, n))]
    if isinstance(layer, normalization.BatchNorm2d):
        kind = nn.BatchNorm2d if layer.out_width else nn.BatchNorm1d
        module = kind(layer.num_features, layer.eps, 1 - layer.momentum)
        running = module.running_mean, module.running_var
        for target, value in zip(running, (layer.running_mean, layer.running_var), strict=True):
            if target is not None:
                target.copy_(value)
        return [_filled(module, layer)]
    if isinstance(layer, normalization.RMSNorm):
        return _root_mean_square(layer)
    raise _no_twin(layer, n)


def _root_mean_square(layer: normalization.RMSNorm) -> list[nn.Module]:
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


def _padding(layer: convolution._Convolution | pooling._Pool, n: int) -> int:
    if layer.padding_type == 2 and layer.padding:
        raise PartitionError.because(
            f"to_torch of layer {n}, {layer.get_layer_info()} with padding_type=2",
            "torch.nn pads both sides alike",
            None,
            "padding_type=1, or nn.ZeroPad2d by hand before the layer's twin",
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


def _no_twin(layer: BaseLayer, n: int) -> PartitionError:
    why, hint = "torch.nn has no layer of the same numbers", f"layers of {KNOWN}"
    if isinstance(layer, normalization.LayerNorm):
        why = "it divides by n - 1 and counts the variances of its units; nn.LayerNorm does not"
        hint = "BatchNorm2d or RMSNorm, which have exact twins"
    return PartitionError.because(  # type: ignore[return-value]
        f"to_torch of layer {n}, {layer.get_layer_info()}", why, None, hint
    )

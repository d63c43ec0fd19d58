"""From `torch.nn` to a Bayesian net: weights become means. The way back is in `torch_means`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from unisono.bayes import convolution, linear, normalization, pooling
from unisono.bayes.arrays import check_variance
from unisono.bayes.base_layer import BaseLayer
from unisono.bayes.sequential import Sequential
from unisono.bayes.torch_means import ACTIVATIONS, KNOWN
from unisono.errors import PartitionError

_ONLY: dict[type[nn.Module], dict[str, tuple[object, ...]]] = {
    nn.Conv2d: {"padding_mode": ("zeros",), "groups": (1,), "dilation": ((1, 1),)},
    nn.ConvTranspose2d: {"output_padding": ((0, 0), 0), "groups": (1,), "dilation": ((1, 1),)},
    nn.AvgPool2d: {"ceil_mode": (False,), "divisor_override": (None,)},
    nn.MaxPool2d: {
        "dilation": (1, (1, 1)),
        "ceil_mode": (False,),
        "return_indices": (False,),
    },
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
    if isinstance(layer, normalization.BatchNorm2d):
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
    for kind, module in ACTIVATIONS.items():
        if type(part) is module:
            return kind()
    if isinstance(part, nn.Linear):
        return linear.Linear(part.in_features, part.out_features, part.bias is not None)
    if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
        kind = convolution.Conv2d if isinstance(part, nn.Conv2d) else convolution.ConvTranspose2d
        return kind(
            part.in_channels,
            part.out_channels,
            _one(part, "kernel_size"),
            part.bias is not None,
            _one(part, "stride"),
            _one(part, "padding"),
        )
    if isinstance(part, nn.AvgPool2d | nn.MaxPool2d):
        kind = pooling.AvgPool2d if isinstance(part, nn.AvgPool2d) else pooling.MaxPool2d
        return kind(_one(part, "kernel_size"), _one(part, "stride"), _one(part, "padding"), 1)
    if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
        old = 1 - (0.1 if part.momentum is None else part.momentum)
        return normalization.BatchNorm2d(part.num_features, part.eps, old)
    if isinstance(part, nn.RMSNorm) and len(part.normalized_shape) == 1:
        eps = torch.finfo(part.weight.dtype).eps if part.eps is None else part.eps
        return normalization.RMSNorm(list(part.normalized_shape), eps)
    raise PartitionError.because(
        f"from_torch of {type(part).__name__}",
        "it has no counterpart in unisono.bayes",
        None,
        f"layers of {KNOWN}",
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


def _unknown_setting(part: nn.Module, name: str, hint: str) -> PartitionError:
    return PartitionError.because(  # type: ignore[return-value]
        f"from_torch of {type(part).__name__}({name}={getattr(part, name)!r})",
        "unisono.bayes has no layer of the same numbers",
        None,
        hint,
    )

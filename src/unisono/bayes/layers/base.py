"""`BaseLayer`: what every layer of a Bayesian net has in common, and what a row of layers does.

A layer maps `Moments` to `Moments` (`forward`), remembers in training what `backward` needs, and
turns an incoming `Delta` into deltas of its parameters and one for the layer below.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono import accelerator
from unisono.accelerator import is_accelerator
from unisono.bayes import cuda
from unisono.bayes.moments import (
    ArrayLike,
    Delta,
    Moments,
    check_count,
    check_variance,
    to_array,
    to_tensor,
)
from unisono.bayes.parameters import Parameters, normal, start_scale
from unisono.errors import PartitionError, PlatformError, an

Shape = tuple[int, ...]
"""Of one sample: `(features,)` or `(channels, height, width)`."""


def _flat(name: str, field: str, doc: str) -> property:
    """Return a parameter as a property: a flat numpy copy; assigning writes into the layer."""

    def live(layer: BaseLayer) -> Tensor:
        if layer.params is None:
            return torch.empty(0)
        layer.params.ensure_deltas()
        return getattr(layer.params, field)

    def read(layer: BaseLayer) -> NDArray[Any]:
        return to_array(live(layer))

    def write(layer: BaseLayer, values: ArrayLike) -> None:
        target, what = live(layer), f"{layer.get_layer_name()}.{name}"
        flat = to_tensor(values, target.device, target.dtype).reshape(-1)
        if field.startswith("var"):
            check_variance(flat, what)
        hint = f"a sequence of {target.numel()} numbers"
        check_count(f"{what} = {flat.numel()} numbers", flat.numel(), target.numel(), hint)
        target.copy_(flat.view(target.shape))
        if field.startswith("delta") and layer.params is not None:
            layer.params.deltas_written = True

    return property(read, write, doc=doc)


class BaseLayer(ABC):
    """Base of all layers."""

    is_activation = False
    """Activations send deltas back as they are: the layer above multiplies their slope in."""
    is_block = False
    """Whether it is only the layers inside of it."""
    keeps_shape = False
    """Whether output and input of a sample have the same shape, whatever it is."""
    info = "{name}()"
    """How a layer is told in one line, of its name and its attributes."""
    piece: int | None = None
    """Numbers that are read together, of a sample that may have any number of such pieces."""
    gain_weight = gain_bias = 1.0
    """Factors on the start standard deviations."""
    init_method = "He"

    mu_w = _flat("mu_w", "mean_w", "Means of the weights, flat; assigning writes.")
    var_w = _flat("var_w", "var_w", "Variances of the weights, flat; assigning writes.")
    mu_b = _flat("mu_b", "mean_b", "Means of the biases, flat; assigning writes.")
    var_b = _flat("var_b", "var_b", "Variances of the biases, flat; assigning writes.")
    delta_mu_w = _flat("delta_mu_w", "delta_mean_w", "Deltas of `mu_w`.")
    delta_var_w = _flat("delta_var_w", "delta_var_w", "Deltas of `var_w`.")
    delta_mu_b = _flat("delta_mu_b", "delta_mean_b", "Deltas of `mu_b`.")
    delta_var_b = _flat("delta_var_b", "delta_var_b", "Deltas of `var_b`.")

    def __init__(self) -> None:
        self.input_size = self.output_size = 0
        self.in_width = self.in_height = self.in_channels = 0
        self.out_width = self.out_height = self.out_channels = 0
        self.num_weights = self.num_biases = 0
        self.bias = False
        self.num_threads = 1
        self.training = True
        self.params: Parameters | None = None
        self._device = torch.device("cpu")
        self._memory: Any = None

    # What a subclass provides.

    def plan(self, shape: Shape | None) -> Shape | None:
        """Take in the shape of one input sample and return that of one output sample.

        None is "not known yet". Called again whenever the shape changes; parameters never depend
        on it.
        """
        return shape

    def fixed_input(self) -> int | None:
        """Return the numbers that a sample must have; None where the layer takes what comes."""
        return None

    @abstractmethod
    def forward(self, x: Moments) -> Moments:
        """Return the moments of the output; in training, remember what `backward` needs."""

    @abstractmethod
    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Write the sums of the parameters' deltas; return the input's delta if `to_input`."""

    def init_weight_bias(self) -> None:
        """Draw new start values, in all layers inside."""
        for _, layer in self.inner():
            layer.init_weight_bias()

    def get_layer_info(self) -> str:
        """Return the layer in one line, as files and tables name it."""
        return self.info.format(self, name=self.get_layer_name())

    # What all layers share.

    def get_layer_name(self) -> str:
        """Return the name of the class."""
        return type(self).__name__

    def get_max_num_states(self) -> int:
        """Return the larger of the numbers of input and output units; of a block, the largest."""
        if self.is_block:
            return max((layer.get_max_num_states() for _, layer in self.inner()), default=0)
        return max(self.input_size, self.output_size)

    def to_cuda(self) -> Self:
        """Move the layer to the current CUDA device and return it."""
        self.device = cuda.NAME
        return self

    @property
    def device(self) -> str:
        """Where the layer's tensors live."""
        return str(self._device)

    @device.setter
    def device(self, value: str) -> None:
        self.move(checked_device(value, self.get_layer_info()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameter tensors by name; changes to them change the layer."""
        if self.params is None:
            return {}
        return dict(zip(("mu_w", "var_w", "mu_b", "var_b"), self.params.values, strict=True))

    def inner(self, path: str = "") -> list[tuple[str, BaseLayer]]:  # noqa: ARG002
        """Return the layers directly inside with their places; `path` is this layer's own."""
        return []

    def leaves(self, path: str = "") -> Iterator[tuple[str, BaseLayer]]:
        """Yield the plain layers in walk order with their keys; `path` is this layer's place."""
        if not self.is_block:
            yield f"{self.get_layer_name()}.{path}", self
            return
        for place, layer in self.inner(path):
            yield from layer.leaves(place)

    def move(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Put all tensors of the layer on another device or in another dtype."""
        if self.params is not None:
            self.params.move(device, dtype)
        for _, layer in self.inner():
            layer.move(device, dtype)
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Drop what `forward` remembered."""
        self._memory = None
        for _, layer in self.inner():
            layer.forget()

    def snapshot(self) -> dict[str, Any]:
        """Return all that a forward pass may change, for `put_back`."""
        return dict(vars(self))

    def put_back(self, values: dict[str, Any]) -> None:
        """Become what `snapshot` saw."""
        vars(self).clear()
        vars(self).update(values)

    def _remember(self, *values: Any) -> None:
        self._memory = values if self.training else None

    def _draw(self, shape: Shape, bias_shape: Shape, fan_in: int, fan_out: int) -> None:
        """Start from random means and equal variances, of the scale that the fans give."""
        scale = start_scale(self.init_method, fan_in, fan_out)
        mean_b = normal(bias_shape, scale) if self.bias else None
        var_b = torch.full(bias_shape, (self.gain_bias * scale) ** 2) if self.bias else None
        var_w = torch.full(shape, (self.gain_weight * scale) ** 2)
        self._start_from(normal(shape, scale), var_w, mean_b, var_b)

    def _start_from(
        self, mean_w: Tensor, var_w: Tensor, mean_b: Tensor | None, var_b: Tensor | None
    ) -> None:
        """Take these start values; into the present tensors, if the layer has some."""
        if self.params is None:
            self.params = Parameters(mean_w, var_w, mean_b, var_b)
            self.num_weights, self.num_biases = mean_w.numel(), self.params.mean_b.numel()
            return
        for live, new in zip(self.params.values, (mean_w, var_w, mean_b, var_b), strict=True):
            if new is not None:
                live.copy_(new)

    @property
    def _live(self) -> Parameters:
        if self.params is None:
            raise TypeError(f"{self.get_layer_name()} has no parameters")
        return self.params

    def _set_shapes(self, inside: Shape | None, outside: Shape | None) -> Shape | None:
        """Write the size attributes and return `outside`."""
        if inside is not None:
            self.input_size = math.prod(inside)
            if len(inside) == 3:
                self.in_channels, self.in_height, self.in_width = inside
        if outside is not None:
            self.output_size = math.prod(outside)
            if len(outside) == 3:
                self.out_channels, self.out_height, self.out_width = outside
        return outside

    def _check_size(self, shape: Shape, expected: int) -> None:
        """Refuse a sample of another size than this layer reads."""
        size = math.prod(shape)
        request = f"{self.get_layer_info()} reads {expected} numbers per sample, not {list(shape)}"
        check_count(request, size, expected, f"input_size={size}, or {expected} outputs before it")

    def __repr__(self) -> str:
        return self.get_layer_info()


def same_info(info: str, other: str) -> bool:
    """Compare infos without regard to case, and to image sizes, on which no parameter depends.

    Channels of a pool that are not known yet (0) match any.

    >>> same_info("Conv2d(1,2,0,0,3)", "conv2d(1,2,6,6,3)"), same_info("ReLU()", "Tanh()")
    (True, False)
    """
    infos = [text.lower().rstrip(")").replace("(", ",").split(",") for text in (info, other)]
    if {len(words) for words in infos} != {6}:  # a name, channels, width, height, kernel
        return infos[0] == infos[1]
    pairs = [pair for n, pair in enumerate(zip(*infos, strict=True)) if n not in (3, 4)]
    return all(a == b or "0" in (a, b) for a, b in pairs)


def check_sizes(layer: BaseLayer, least: int = 1, **sizes: int) -> None:
    """Refuse sizes of a layer that are not integers of at least `least`."""
    for name, size in sizes.items():
        is_integer = isinstance(size, int | np.integer)
        if not is_integer or size < least:
            raise PartitionError.because(
                f"{layer.get_layer_name()}({name}={size})",
                arithmetic=f"{size} < {least}" if is_integer else "not an integer",
                hint=f"{name}={max(least, 1)}",
            )


def checked_device(name: str | torch.device, what: str = "a net") -> torch.device:
    """Return the device of that name, if this machine has it; `what` is to live there."""
    hint = 'net.to_device("cpu")'
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PlatformError.because(
            f"{what} on {name!r}", "no kind of device has that name", hint=hint
        ) from None
    if device.type == cuda.NAME and cuda.is_on_cpu():
        return torch.device("cpu")
    count = accelerator.count(device.type) if is_accelerator(device) else 1
    if device.type == "meta" or (device.index or 0) >= count:
        devices = f"{count} {device.type} devices on this machine"
        raise PlatformError.because(f"{what} on {name}", devices, hint=hint)
    return device


def check_layers(layers: Sequence[object]) -> None:
    """Refuse what is not a layer of this package."""
    for n, layer in enumerate(layers):
        if not isinstance(layer, BaseLayer):
            raise PartitionError.because(
                f"layer {n} = {layer!r}",
                an(type(layer).__name__),
                hint="layers of unisono.bayes; from_torch(module) reads those of torch.nn",
            )


def forward_through(layers: Sequence[BaseLayer], x: Moments) -> Moments:
    """Return the moments behind these layers."""
    for layer in layers:
        x = layer.forward(x)
    return x


def backward_through(layers: Sequence[BaseLayer], delta: Delta, *, to_input: bool) -> Delta | None:
    """Write all deltas of these layers; return that of their input if `to_input`.

    Only the lowest layer that has units may skip the delta of its input.
    """
    lowest = next((layer for layer in layers if not layer.is_activation), None)
    back: Delta | None = delta
    for layer in reversed(layers):
        if back is not None and not layer.is_activation:
            back = layer.backward(back, to_input=to_input or layer is not lowest)
    return back


def plan_through(layers: Sequence[BaseLayer], shape: Shape | None) -> Shape | None:
    """Let each layer take in its shape; errors say which layers do not fit."""
    for n, layer in enumerate(layers):
        try:
            shape = layer.plan(shape)
        except PartitionError as error:
            before = f", after layer {n - 1}, {layers[n - 1].get_layer_info()}" if n else ""
            raise PartitionError(f"layer {n}, {layer.get_layer_info()}{before}: {error}") from None
    return shape


def fixed_input(layers: Sequence[BaseLayer], *, flat: bool = False) -> int | None:
    """Return the numbers a sample must have, if a layer says so before the shape changes.

    Samples of a `flat` input, which come in one row, are of one piece where nothing tells more.
    """
    for layer in layers:
        size = layer.fixed_input()
        if size is None and flat:
            size = layer.piece
        if size is not None or not layer.keeps_shape:
            return size
    return None

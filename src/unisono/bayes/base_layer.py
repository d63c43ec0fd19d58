"""`BaseLayer`: what every layer of a Bayesian net has in common.

A layer maps `Moments` to `Moments` (`forward`), remembers in training what `backward` needs, and
turns an incoming `Delta` into deltas of its parameters and one for the layer below.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.bayes.arrays import ArrayLike, check_variance, to_array, to_tensor, write_into
from unisono.bayes.devices import checked_device
from unisono.bayes.moments import Delta, Moments
from unisono.bayes.parameters import Parameters
from unisono.errors import PartitionError

Shape = tuple[int, ...]
"""Of one sample: `(features,)` or `(channels, height, width)`."""


class _Flat:
    """A parameter as a flat numpy copy; assigning a sequence of the right length writes."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: BaseLayer | None, owner: type | None = None) -> NDArray[Any]:
        if layer is None:
            return self  # type: ignore[return-value]
        return to_array(self._live(layer))

    def __set__(self, layer: BaseLayer, values: ArrayLike) -> None:
        live, what = self._live(layer), f"{layer.get_layer_name()}.{self.name}"
        if self.field.startswith("var"):
            check_variance(to_tensor(values, live.device, live.dtype), what)
        write_into(live, values, what)
        if self.field.startswith("delta"):
            layer.deltas_written = True

    def _live(self, layer: BaseLayer) -> Tensor:
        if layer.params is None:
            return torch.empty(0)
        layer.params.ensure_deltas()
        return getattr(layer.params, self.field)


class BaseLayer(ABC):
    """Base of all layers."""

    is_activation = False
    """Activations send deltas back as they are: the layer above multiplies their slope in."""

    keeps_shape = False
    """Whether output and input of a sample have the same shape, whatever it is."""

    mu_w = _Flat("mean_w")
    var_w = _Flat("var_w")
    mu_b = _Flat("mean_b")
    var_b = _Flat("var_b")
    delta_mu_w = _Flat("delta_mean_w")
    delta_var_w = _Flat("delta_var_w")
    delta_mu_b = _Flat("delta_mean_b")
    delta_var_b = _Flat("delta_var_b")

    def __init__(self) -> None:
        self.input_size = self.output_size = 0
        self.in_width = self.in_height = self.in_channels = 0
        self.out_width = self.out_height = self.out_channels = 0
        self.num_weights = self.num_biases = 0
        self.bias = False
        self.num_threads = 1
        self.training = True
        self.params: Parameters | None = None
        self.deltas_written = False
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
        for layer in self.children():
            layer.init_weight_bias()

    def get_layer_info(self) -> str:
        """Return the layer in one line, as files and tables name it."""
        return f"{self.get_layer_name()}()"

    # What all layers share.

    def get_layer_name(self) -> str:
        """Return the name of the class."""
        return type(self).__name__

    def get_max_num_states(self) -> int:
        """Return the larger of the numbers of input and output units."""
        return max(self.input_size, self.output_size)

    def to_cuda(self) -> BaseLayer:
        """Move the layer to the current CUDA device and return it."""
        self.move(checked_device("cuda", self.get_layer_info()))
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

    def deltas(self) -> tuple[Tensor, ...]:
        """Return the live deltas of the parameters."""
        p = self.params
        return () if p is None else (p.delta_mean_w, p.delta_var_w, p.delta_mean_b, p.delta_var_b)

    def children(self) -> list[BaseLayer]:
        """Return the layers directly inside."""
        return []

    def leaves(self, path: str) -> Iterator[tuple[str, BaseLayer]]:
        """Yield the plain layers in walk order with their keys; `path` is this layer's place."""
        yield f"{self.get_layer_name()}.{path}", self

    def move(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Put all tensors of the layer on another device or in another dtype."""
        if self.params is not None:
            self.params.move(device, dtype)
        for layer in self.children():
            layer.move(device, dtype)
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Drop what `forward` remembered."""
        self._memory = None
        for layer in self.children():
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

    def _own(
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

    def _check_size(self, found: Shape, wanted: int) -> None:
        """Refuse a sample of another size than this layer reads."""
        size = math.prod(found)
        if size != wanted:
            sizes = " * ".join(map(str, found))
            raise PartitionError.because(
                f"{self.get_layer_info()} reads {wanted} numbers a sample",
                f"a sample of {size}" + (f" = {sizes}" if len(found) > 1 else ""),
                f"{size} != {wanted}",
                f"input_size={size}, or {wanted} outputs in the layer before",
            )

    def __repr__(self) -> str:
        return self.get_layer_info()

"""`LayerBlock`: layers in a row as one layer. `ResNetBlock`: two branches that are added."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from unisono.bayes.layers.base import (
    BaseLayer,
    Shape,
    backward_through,
    check_layers,
    fixed_input,
    forward_through,
    plan_through,
)
from unisono.bayes.moments import BaseDeltaStates, BaseHiddenStates, Delta, Moments
from unisono.errors import PartitionError


class LayerBlock(BaseLayer):
    """Layers in a row, used as one.

    Args:
        layers: the layers, first to last.
    """

    is_block = True
    info = "LayerBlock({0.input_size},{0.output_size})"

    def __init__(self, *layers: BaseLayer) -> None:
        super().__init__()
        check_layers(layers)
        self.layers = list(layers)
        self.plan(None)

    def switch_to_cuda(self) -> None:
        """Move all layers to the current CUDA device."""
        self.to_cuda()

    def fixed_input(self) -> int | None:
        """As its first layers say."""
        return fixed_input(self.layers)

    @property
    def piece(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As its first layers say."""
        return fixed_input(self.layers, flat=True)

    def plan(self, shape: Shape | None) -> Shape | None:
        """From layer to layer."""
        outside = plan_through(self.layers, shape)
        if shape is None and (size := self.fixed_input()) is not None:
            shape = (size,)
        return self._set_shapes(shape, outside)

    def forward(self, x: Moments) -> Moments:
        """First to last."""
        return forward_through(self.layers, x)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Last to first."""
        return backward_through(self.layers, delta, to_input=to_input)

    def inner(self, path: str = "") -> list[tuple[str, BaseLayer]]:
        """Return the layers."""
        return [(f"{path}.{n}", layer) for n, layer in enumerate(self.layers)]


class ResNetBlock(BaseLayer):
    """Two branches over the same input, added.

    Args:
        main_block: a layer or a `LayerBlock`.
        shortcut: the other branch; None is the input itself.
    """

    is_block = True
    info = "ResNetBlock({0.input_size},{0.output_size})"

    def __init__(self, main_block: BaseLayer, shortcut: BaseLayer | None = None) -> None:
        super().__init__()
        check_layers((main_block,) if shortcut is None else (main_block, shortcut))
        self.main_block, self.shortcut = main_block, shortcut
        self.input_z, self.input_delta_z = BaseHiddenStates(), BaseDeltaStates()
        self.shortcut_output_z, self.shortcut_output_delta_z = BaseHiddenStates(), BaseDeltaStates()
        self.plan(None)

    def init_shortcut_state(self) -> None:
        """Do nothing: buffers are made when they are needed."""

    def init_shortcut_delta_state(self) -> None:
        """Do nothing: buffers are made when they are needed."""

    def init_input_buffer(self) -> None:
        """Do nothing: buffers are made when they are needed."""

    def inner(self, path: str = "") -> list[tuple[str, BaseLayer]]:
        """Return the branches, main first."""
        branches = {"main": self.main_block, "shortcut": self.shortcut}
        return [(f"{name}.{path}", b) for name, b in branches.items() if b is not None]

    def fixed_input(self) -> int | None:
        """As one of its branches says."""
        sizes = (branch.fixed_input() for _, branch in self.inner())
        return next((size for size in sizes if size is not None), None)

    def plan(self, shape: Shape | None) -> Shape | None:
        """Both branches must give the same number of units."""
        main, *others = (branch.plan(shape) for _, branch in self.inner())
        if shape is None and (size := self.fixed_input()) is not None:
            shape = (size,)
        other = others[0] if others else shape
        sizes = [None if s is None else math.prod(s) for s in (main, other)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise PartitionError.because(
                "ResNetBlock adds its branches",
                f"main gives {sizes[0]} units of shape {main}, the shortcut {sizes[1]} of {other}",
                f"{sizes[0]} != {sizes[1]}",
                "a shortcut of the same output size, such as Conv2d(..., kernel_size=1)",
            )
        return self._set_shapes(shape, main)

    def forward(self, x: Moments) -> Moments:
        """Add the branches."""
        main = self.main_block.forward(x)
        other = x if self.shortcut is None else self.shortcut.forward(x)
        other = other.reshaped(*main.mean.shape)
        self._remember(main.slope, other.slope)
        if main.var is None or other.var is None:
            var = other.var if main.var is None else main.var
        else:
            var = main.var + other.var
        if self.training:
            self.input_z.hold(x)
            self.shortcut_output_z.hold(other)
        return Moments(main.mean + other.mean, var)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Through both branches; the results are added."""
        main_slope, other_slope = self._memory
        main_delta, other = delta.through(main_slope), delta.through(other_slope)
        self.shortcut_output_delta_z.hold(other)
        back = backward_through([self.main_block], main_delta, to_input=to_input)
        if self.shortcut is not None:
            other = backward_through([self.shortcut], other, to_input=to_input)
        if back is None or other is None or not to_input:
            return None
        other = other.reshaped(*back.mean.shape)
        total = Delta(back.mean + other.mean, back.var + other.var)
        self.input_delta_z.hold(total)
        return total


def nan_in(*values: torch.Tensor | None) -> bool:
    """Whether one of these tensors holds a NaN."""
    return any(t is not None and bool(torch.isnan(t).any()) for t in values)


def first_nan(layers: Sequence[BaseLayer], x: Moments, place: str = "") -> str:
    """Say which layer a NaN comes from; runs them once more.

    Args:
        layers: of a net, or of a block in it.
        x: what they read, finite.
        place: of the block.
    """
    for n, layer in enumerate(layers):
        where = f"layer {place}{n}, {layer.get_layer_info()}"
        if isinstance(layer, LayerBlock):
            origin = first_nan(layer.layers, x, f"{place}{n}.")
            if origin:
                return origin
        for _, leaf in layer.leaves():
            for name, tensor in leaf.tensors().items():
                if nan_in(tensor):
                    return f"{where}: {name} of {leaf.get_layer_info()} holds a NaN"
        x = layer.forward(x)
        if nan_in(x.mean, x.var, x.slope):
            return f"{where}: its output is NaN, of inputs and parameters without one"
    return ""

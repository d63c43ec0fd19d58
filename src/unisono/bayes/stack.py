"""The layers of a net and the memory they share: what all parts of `Sequential` stand on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import torch

from unisono.bayes.base_layer import BaseLayer, Shape
from unisono.bayes.blocks import check_layers, fixed_input, plan_through
from unisono.bayes.devices import checked_device
from unisono.bayes.parameters import Arena, Parameters
from unisono.errors import PartitionError, PlatformError


class LayerStack:
    """Layers in a row, their parameters in one arena, on one device in one dtype."""

    def __init__(self, *layers: BaseLayer) -> None:
        check_layers(layers)
        self.layers = list(layers)
        self._device = torch.device("cpu")
        self._dtype = torch.float32
        self._training = True
        self._told_input = fixed_input(self.layers)
        self._planned: Shape | None = None
        self._remembers = False
        """Whether the layers have what backward needs."""
        self._output_shape = plan_through(self.layers, None)
        self._check_no_repeats()
        self._arena = Arena(self._parameter_sets(), self._device, self._dtype)

    def leaves(self) -> Iterator[tuple[str, BaseLayer]]:
        """Yield all plain layers in walk order with the keys of state dicts."""
        for n, layer in enumerate(self.layers):
            yield from layer.leaves(str(n))

    def all_layers(self) -> Iterator[BaseLayer]:
        """Yield every layer: blocks, and what is in them."""
        waiting = list(self.layers)
        while waiting:
            layer = waiting.pop()
            yield layer
            waiting += layer.children()

    def _check_no_repeats(self) -> None:
        seen: dict[int, str] = {}
        for key, layer in self.leaves():
            if not layer.is_activation and id(layer) in seen:
                raise PartitionError.because(
                    f"{key} is the same object as {seen[id(layer)]}",
                    "a layer remembers one input, so it can stand in one place",
                    None,
                    f"another {layer.get_layer_name()}(...) there",
                )
            seen[id(layer)] = key

    def _parameter_sets(self) -> list[Parameters]:
        return [layer.params for _, layer in self.leaves() if layer.params is not None]

    @property
    def arena(self) -> Arena:
        """The flat memory; made anew if a layer has moved to another net meanwhile."""
        members = self._parameter_sets()
        if not self._arena.holds(members):
            self._arena = Arena(members, self._device, self._dtype)
        return self._arena

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the arena: copies of tensors do not share their memory."""
        state = dict(vars(self))
        return {**state, "_arena": state["_arena"].floored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._arena = Arena(self._parameter_sets(), self._device, self._dtype)
        self._arena.floored = state["_arena"]

    @contextlib.contextmanager
    def _all_or_nothing(self, *, keep: bool = True) -> Iterator[None]:
        """Put all layers back as they were if the body raises; at any end unless `keep`."""
        planned, training = self._planned, self._training
        snapshots = [(layer, layer.snapshot()) for layer in self.all_layers()]
        done = False
        try:
            yield
            done = keep
        finally:
            if not done:
                for layer, values in snapshots:
                    layer.put_back(values)
                self._planned, self._training = planned, training

    @property
    def device(self) -> str:
        """Where the net lives."""
        return str(self._device)

    def to(self, device_or_dtype: str | torch.device | torch.dtype) -> Self:
        """Move the net to a device, or convert it to a dtype; returns the net."""
        if isinstance(device_or_dtype, torch.dtype):
            if device_or_dtype not in (torch.float32, torch.float64):
                raise PlatformError.because(
                    f"to({device_or_dtype})",
                    "variances need float32 or float64",
                    None,
                    "net.float() or net.double()",
                )
            self._dtype = device_or_dtype
        else:
            self._device = checked_device(device_or_dtype)
        for layer in self.layers:
            layer.move(self._device, self._dtype)
        self._remembers = False
        self._arena = Arena(self._parameter_sets(), self._device, self._dtype)
        return self

    def double(self) -> Self:
        """Compute in float64 from now on; returns the net."""
        return self.to(torch.float64)

    def float(self) -> Self:
        """Compute in float32 from now on; returns the net."""
        return self.to(torch.float32)

    def to_device(self, device: str) -> None:
        """Move the net to `"cpu"`, `"cuda"`, `"cuda:1"`, `"mps"`."""
        self.to(device)

    def train(self) -> None:
        """Remember in forward what backward needs; normalise by batches."""
        self._set_training(True)

    def eval(self) -> None:
        """Remember nothing; normalise by running values."""
        self._set_training(False)

    def _set_training(self, training: bool) -> None:
        self._training = training
        for layer in self.all_layers():
            layer.training = training

    def num_parameters(self) -> int:
        """Return the number of mean scalars."""
        return sum(p.mean_w.numel() + p.mean_b.numel() for p in self._parameter_sets())

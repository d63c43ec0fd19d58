"""Equal draws: a random layer that all ranks hold as a whole draws the same numbers on each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unisono.nn.dropout import OwnDropout
from unisono.nn.parameters import shared_generator
from unisono.nn.uncompiled import runs_uncompiled
from unisono.topology import Partition

_RANDOM = (
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
)


def may_draw(module: nn.Module) -> bool:
    """Whether the forward of a module may draw from torch's generators.

    Some layers of torch do; what the forward of anybody else's does is not known.
    """
    return any(
        isinstance(layer, _RANDOM) or not type(layer).__module__.startswith("torch.nn.")
        for layer in module.modules()
        if not isinstance(layer, OwnDropout)
    )


class EqualDraws:
    """Lends a module a state of torch's generators that is equal on all ranks, in training.

    What the ranks' own generators give meanwhile and afterwards does not change.

    Args:
        module: gets hooks around its forward.
        partition: the ranks. Collective over them.
    """

    def __init__(self, module: nn.Module, partition: Partition) -> None:
        comm = partition.comm if partition.active and partition.root.size > 1 else None
        with shared_generator(comm) as generator:
            self._seed = int(torch.randint(2**62, (), generator=generator))
        self._lent: dict[torch.device, Tensor] = {}
        self._own: list[dict[torch.device, Tensor]] = []
        module.register_forward_pre_hook(self._lend)
        module.register_forward_hook(self._take_back, always_call=True)

    @runs_uncompiled
    def _lend(self, module: nn.Module, input: tuple[Any, ...]) -> None:
        if not module.training:
            self._own.append({})
            return
        found = {x.device for x in input if isinstance(x, Tensor) and x.device.type == "cuda"}
        own = {device: _state(device) for device in (torch.device("cpu"), *found)}
        for device in own:
            if device in self._lent:
                _set_state(device, self._lent[device])
            else:
                seeded = torch.Generator(device).manual_seed(self._seed)
                _set_state(device, seeded.get_state())
        self._own.append(own)

    @runs_uncompiled
    def _take_back(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        if not self._own:  # the forward did not get as far as the first hook
            return
        for device, state in self._own.pop().items():
            self._lent[device] = _state(device)
            _set_state(device, state)


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)

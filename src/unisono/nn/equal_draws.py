"""Equal draws: a random layer that all ranks hold as a whole draws the same numbers on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.torch.private import runs_uncompiled
from unisono.nn.drawing import Draws
from unisono.nn.dropout import OwnDropout
from unisono.topology import Partition

_CPU = torch.device("cpu")
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


@dataclass
class _Loan:
    """A state lent for one call."""

    before: Tensor
    """The rank's own state at first, to which it goes back if nothing was drawn."""
    own: dict[torch.device, Tensor]
    lent: dict[torch.device, Tensor]


class EqualDraws:
    """Lends a module a state of torch's generators that is equal on all ranks, in training.

    Afterwards the rank's own generators are as they were, but for one number if any was drawn.

    Args:
        module: gets hooks around its forward.
        partition: the ranks. Collective over them.
    """

    def __init__(self, module: nn.Module, partition: Partition) -> None:
        self._draws = Draws(partition)
        self._loans: list[_Loan | None] = []
        module.register_forward_pre_hook(self._lend)
        module.register_forward_hook(self._take_back, always_call=True)

    @runs_uncompiled
    def _lend(self, module: nn.Module, input: tuple[Any, ...]) -> None:
        if not any(layer.training for layer in module.modules()):
            self._loans.append(None)
            return
        before = torch.get_rng_state()
        number = self._draws.next_call()
        found = {x.device for x in input if isinstance(x, Tensor) and x.device.type == "cuda"}
        own = {device: _state(device) for device in (_CPU, *found)}
        lent = {device: self._draws.generator(number, device).get_state() for device in own}
        for device, state in lent.items():
            _set_state(device, state)
        self._loans.append(_Loan(before, own, lent))

    @runs_uncompiled
    def _take_back(self, module: nn.Module, input: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        loan = self._loans.pop() if self._loans else None
        if loan is None:
            return
        is_used = any(not torch.equal(_state(at), state) for at, state in loan.lent.items())
        for device, state in loan.own.items():
            _set_state(device, state)
        if not is_used:
            torch.set_rng_state(loan.before)


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)

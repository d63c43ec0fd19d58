"""Random layers of a split network: apart where ranks hold different points, else equal.

Each call of a layer has a number, and numbers have their own seeds. What is computed again in a
backward (activation checkpointing) gets the number of the first time: torch has put its generator
back to where it was then, so the one number that each call takes from it tells which call that was.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm.torch.private import runs_uncompiled
from unisono.errors import UnisonoError
from unisono.nn.parameters import shared_generator
from unisono.topology import Partition

_KEPT = 4096
"""Calls that may still be computed again."""
_CPU = torch.device("cpu")


class Draws:
    """Seeds of the calls of one layer.

    Args:
        partition: the ranks. Collective over them.
        place: ranks with the same number get the same seeds, others their own.
    """

    def __init__(self, partition: Partition, place: int = 0) -> None:
        comm = partition.comm if partition.active and partition.root.size > 1 else None
        with shared_generator(comm) as generator:
            self._seed = int(torch.randint(2**62, (), generator=generator)) + place
        self._calls = 0
        self._numbers: OrderedDict[int, int] = OrderedDict()

    def next_call(self) -> int:
        """Return the number of this call; takes one number from this rank's default generator."""
        mark = int(torch.randint(2**62, ()))
        if torch._C._current_graph_task_id() != -1:
            if mark not in self._numbers:
                raise UnisonoError.because(
                    "a layer that may draw numbers, computed again in a backward",
                    "torch's generator is not where it was the first time: masks would differ",
                    None,
                    "checkpoint(..., preserve_rng_state=True)",
                )
            return self._numbers[mark]
        self._calls += 1
        self._numbers[mark] = self._calls
        if len(self._numbers) > _KEPT:
            self._numbers.popitem(last=False)
        return self._calls

    def generator(self, number: int, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a generator with the seed of a call."""
        seed = (self._seed + number * 0x9E3779B97F4A7C15) % 2**63
        return torch.Generator(device).manual_seed(seed)


class OwnDropout(nn.Module):
    """`torch.nn.Dropout` whose masks do not depend on what else a rank draws.

    Args:
        p: probability of a zero.
        partition: the ranks.
        place: ranks with the same number draw the same masks, others their own.
    """

    def __init__(self, p: float, partition: Partition, place: int) -> None:
        super().__init__()
        self.p = p
        self._draws = Draws(partition, place)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` with elements zeroed in training, scaled to keep its mean."""
        if not self.training or self.p == 0.0:
            return input
        if self.p == 1.0:
            return input * 0.0
        generator = self._draws.generator(self._draws.next_call())
        kept = torch.rand(self._mask_shape(input), generator=generator) >= self.p
        return input * kept.to(device=input.device, dtype=input.dtype) / (1.0 - self.p)

    def _mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return how many numbers are drawn: one for each element."""
        return tuple(x.shape)


class OwnChannelDropout(OwnDropout):
    """`torch.nn.Dropout1d/2d/3d` of `(N, C, ...)`: ranks with parts of a sample draw the same.

    Args:
        p: probability of a zero.
        partition: the ranks.
        place: a number that ranks share where they hold the same samples.
    """

    def _mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return how many numbers are drawn: one for each channel of a sample."""
        return (*x.shape[:2], *(1,) * (x.dim() - 2))


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

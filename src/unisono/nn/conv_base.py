"""What all split convolutions share: their settings, their windows, and the way through space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

from unisono.errors import PartitionError
from unisono.nn.agreement import INPUTS
from unisono.nn.conv_overlap import ConvFlight, ConvInSpace, SpacePlan, empty_output, start
from unisono.nn.conv_settings import ConvSettings, Overlap, Size, conv_settings
from unisono.nn.parameters import Weights, check_weights
from unisono.nn.state import HoldingModule
from unisono.nn.structure import Cuts, is_plain
from unisono.operators.halo import HaloOnGroup
from unisono.operators.plans import Flight
from unisono.topology import halo
from unisono.topology.cover import Cover, cover
from unisono.topology.halo import HaloPlan

P = TypeVar("P")


MOST_PATCHED = 1 / 16
"""With `overlap="auto"`, patches may give at most this share of the outputs, ..."""
LEAST_WORK = 1 << 26
"""... and the convolution must have this many multiplications."""


class ConvBase(HoldingModule[P]):
    """A convolution of a tensor `(N, C, ...)` that is split over ranks."""

    _word_travels = "beside"
    dims: ClassVar[int]

    def _settle(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size,
        padding: Size | str, padding_mode: str, dilation: Size, groups: int, bias: bool,
        overlap: Overlap, weights: Weights,
    ) -> None:  # fmt: skip
        """Take the arguments that all convolutions have."""
        name = type(self).__name__
        self.settings: ConvSettings = conv_settings(
            name, self.dims, in_channels, out_channels, kernel_size, stride, padding,
            padding_mode, dilation, groups,
        )  # fmt: skip
        if overlap not in ("auto", True, False):
            raise PartitionError.because(
                f"{name}(overlap={overlap!r})", 'choices: "auto", True, False', None, '"auto"'
            )
        self._padding_word = padding if isinstance(padding, str) else None
        self.overlap: Overlap = overlap
        self.weights: Weights = check_weights(weights)
        self.use_bias = bias

    @property
    def in_channels(self) -> int:
        """Channels of the whole input."""
        return self.settings.in_channels

    @property
    def out_channels(self) -> int:
        """Channels of the whole output."""
        return self.settings.out_channels

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """One size for each spatial dim."""
        return self.settings.kernel_size

    @property
    def stride(self) -> tuple[int, ...]:
        """One stride for each spatial dim."""
        return self.settings.stride

    @property
    def padding(self) -> str | tuple[int, ...] | tuple[tuple[int, int], ...]:
        """As torch has it: a word, or one int a dim; pairs if the two sides of a dim differ."""
        if self._padding_word is not None:
            return self._padding_word
        pairs = self.settings.padding
        if any(left != right for left, right in pairs):
            return pairs
        return tuple(left for left, _right in pairs)

    @property
    def padding_mode(self) -> str:
        """What stands outside the tensor."""
        return self.settings.padding_mode

    @property
    def dilation(self) -> tuple[int, ...]:
        """One dilation for each spatial dim."""
        return self.settings.dilation

    @property
    def groups(self) -> int:
        """Into how many groups the channels fall."""
        return self.settings.groups

    def _check_channels(self, cuts: Cuts) -> None:
        found, wanted = cuts[1][-1], self.settings.in_channels
        if found != wanted:
            raise PartitionError.because(
                f"{type(self).__name__}(in_channels={wanted})",
                f"an input of global shape {[own[-1] for own in cuts]}",
                f"{found} channels != {wanted}",
                f"in_channels={found}",
            )

    def _halo_at(self, cuts: Cuts, index: Sequence[int]) -> HaloPlan:
        s = self.settings
        return halo.plan(
            cuts, index, s.kernel_size, s.stride, s.padding, s.dilation, s.padding_mode
        )

    def _space_plan(self, plan: HaloPlan, ranks: tuple[int, ...]) -> SpacePlan:
        s = self.settings
        comm = self._comm
        if comm is None:  # known from the beginning of set-up
            raise PartitionError(f"{type(self).__name__} is not being set up")
        found = cover(plan, s.kernel_size, s.stride, s.dilation, s.padding)
        if found is not None and not self._splits(plan, found):
            found = None
        return SpacePlan(s, HaloOnGroup(comm, plan, ranks, 0.0), found)

    def _splits(self, plan: HaloPlan, found: Cover) -> bool:
        """Whether to convolve the own block while messages travel, by the rule of "auto".

        Without patches it saves the window and costs nothing. With them it must be worth it: the
        window's copy saved and the wait hidden, against a few small convolutions more.
        """
        if self.overlap != "auto":
            return self.overlap
        if not found.is_whole or not found.patches:
            return found.is_whole
        s = self.settings
        taps = math.prod(s.kernel_size) * s.out_channels // s.groups
        is_large = math.prod(plan.output_shape) * taps >= LEAST_WORK
        return is_large and found.patched_share <= MOST_PATCHED

    def _space(self) -> SpacePlan:
        """Return the current plan in space."""
        raise TypeError(f"{type(self).__name__} has no plan in space")

    def _in_space(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the own share of the convolution by `_space`; messages go before agreement."""
        plain = is_plain(x)

        def begin(fits: bool) -> ConvFlight | Flight:
            if not plain:
                return self._start_window(x if fits else None)
            given = x.detach() if fits else None
            return start(given, weight, bias, self._space(), self._structures[0].dtype)

        flight = self._under_way(begin, (x,))
        tied = self._tied(x, least=INPUTS)
        if isinstance(flight, ConvFlight):
            return ConvInSpace.apply(tied, weight, bias, flight)
        window = self._finish_window(tied, flight)
        shape = self._space().output_shape(weight)
        if 0 in shape:
            return empty_output(window, weight, bias, shape)
        return self.settings.convolved(window, weight, bias)

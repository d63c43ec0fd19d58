"""Channels of a norm: as many as it was made for, in balanced blocks like its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from unisono.errors import PartitionError, an
from unisono.nn.structure import Cuts
from unisono.nn.windows import balanced_in, recut
from unisono.operators.halo import HaloExchange, HaloOnGroup
from unisono.topology import Partition
from unisono.topology.decompose import split_cuts
from unisono.topology.halo import HaloPlan


def balanced_channels(layer: str, count: int, P: Partition, cuts: Cuts) -> tuple[int, ...]:
    """Return the balanced cuts of `count` channels; raise if the input has more or fewer.

    Args:
        layer: name of the layer, for messages.
        count: channels that it was made for.
        P: partition of the input.
        cuts: of the input, in every dim.
    """
    found = cuts[1][-1]
    if found != count:
        raise PartitionError.because(
            f"{layer} of {count} channels",
            f"an input of global shape {[own[-1] for own in cuts]}",
            f"{found} channels != {count}",
            f"{an(layer)} of {found} channels",
        )
    return tuple(split_cuts(count, P.shape[1]))


@dataclass(frozen=True)
class ChannelMove:
    """Channels to balanced blocks, those of the parameters, and back to where they came from."""

    P: Partition
    there: HaloPlan
    back: HaloPlan

    def around(self, normalise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the block that the input's cuts give this rank, normalised in balanced blocks."""
        return self._moved(normalise(self._moved(x, self.there)), self.back)

    def _moved(self, x: Tensor, plan: HaloPlan) -> Tensor:
        if plan.is_identity:
            return x
        return HaloExchange.apply(x, HaloOnGroup(self.P.root, plan, self.P.ranks, 0.0))


def channel_move(P: Partition, cuts: Cuts) -> ChannelMove | None:
    """Return how channels get to balanced blocks; None where they are."""
    balanced = balanced_in(cuts, 1)
    if P.index is None or balanced == tuple(map(tuple, cuts)):
        return None
    return ChannelMove(P, recut(cuts, balanced, P.index), recut(balanced, cuts, P.index))

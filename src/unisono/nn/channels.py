"""Channels of a norm: as many as it was made for, in balanced blocks along dim 1 of a partition."""

from __future__ import annotations

from unisono.errors import PartitionError
from unisono.nn.structure import Cuts
from unisono.topology import Partition
from unisono.topology.decompose import split_cuts


def balanced_channels(layer: str, count: int, P: Partition, cuts: Cuts) -> tuple[int, ...]:
    """Return the cuts of `count` channels, or raise if the input with `cuts` has others.

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
            f"a {layer} of {found} channels",
        )
    balanced = tuple(split_cuts(count, P.shape[1]))
    if tuple(cuts[1]) != balanced:
        raise PartitionError.because(
            f"{layer} on {P!r}",
            f"channels cut at {list(cuts[1])}",
            f"balanced cuts are {list(balanced)}",
            "Repartition(P_x, P_x) first",
        )
    return balanced

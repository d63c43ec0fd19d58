"""What shape and ranks of a partition must be, and the errors when they are not.

No torch and no process here.
"""

from __future__ import annotations

import math

from unisono.errors import PartitionError, name_ranks
from unisono.topology.decompose import fitting_shape

__all__ = ["check_members", "check_shape"]


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise unless there is at least one dim and at least one rank in each."""
    if not shape or min(shape) < 1:
        raise PartitionError.because(
            f"Partition({list(shape)})",
            arithmetic=f"{min(shape)} < 1" if shape else "0 dims",
            hint="at least one dim, and at least 1 rank in each",
        )


def check_members(shape: tuple[int, ...], ranks: tuple[int, ...], root_size: int | None) -> None:
    """Raise unless the ranks are as many as the shape has places, different, and there.

    Args:
        shape: number of ranks along each dim.
        ranks: ranks of the root communicator.
        root_size: number of ranks there; None when it is not known yet.
    """
    asked = f"Partition({list(shape)}, ranks={list(ranks)})"
    count, given = math.prod(shape), len(ranks)
    times = " * ".join(map(str, shape))
    product = f"{times} = {count}" if len(shape) > 1 else times
    if count != given:
        raise PartitionError.because(
            asked,
            arithmetic=f"{product} != {given} ranks",
            hint=f"Partition({list(fitting_shape(shape, given))})"
            if given
            else f"give {count} ranks",
        )
    if len(set(ranks)) != given:
        twice = [rank for rank in set(ranks) if ranks.count(rank) > 1]
        raise PartitionError.because(
            asked,
            f"{name_ranks(twice)} more than once",
            f"{len(set(ranks))} different ranks for {count} blocks",
            "each rank once",
        )
    if min(ranks) < 0:
        raise PartitionError.because(
            asked, arithmetic=f"rank {min(ranks)} < 0", hint="ranks from 0 on"
        )
    if root_size is None or max(ranks) < root_size:
        return
    if count <= root_size:
        raise PartitionError.because(
            asked,
            f"a communicator of {root_size} ranks",
            f"rank {max(ranks)} >= {root_size}",
            f"ranks from 0 to {root_size - 1}",
        )
    raise PartitionError.because(
        f"Partition({list(shape)})",
        f"a communicator of {root_size} ranks",
        f"{product} > {root_size}",
        f"Partition({list(fitting_shape(shape, root_size))}), "
        f"or start {count} ranks: unisono.run(fn, ranks={count})",
    )

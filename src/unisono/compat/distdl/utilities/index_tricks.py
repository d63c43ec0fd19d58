"""DistDL's `utilities.index_tricks`: the number of an index in a grid."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.topology.decompose import flat_index


def cartesian_index_c(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the row-major number of an index.

    >>> cartesian_index_c([2, 3], [1, 0])
    3
    """
    return flat_index(shape, index)


def cartesian_index_f(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the column-major number of an index.

    >>> cartesian_index_f([2, 3], [1, 0])
    1
    """
    return flat_index(shape[::-1], index[::-1])

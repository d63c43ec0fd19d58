"""Which axes of a partition a layer works on: given, or all but those kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from unisono.errors import PartitionError, an
from unisono.topology import Partition
from unisono.topology.window import as_int


def reduced_axes(
    partition: Partition,
    axes: int | Sequence[int] | None,
    keep: int | Sequence[int] | None,
    name: str,
) -> tuple[int, ...]:
    """Return the axes meant by exactly one of `axes` and `keep`, ascending."""
    if (axes is None) == (keep is None):
        given = "both" if axes is not None else "neither"
        raise PartitionError.because(
            f"{name} and axes_keep on {partition!r}",
            f"{given} given ({name}={axes}, axes_keep={keep})",
            None,
            f"give one of them, e.g. {name}=(0,)",
        )
    chosen = _as_axes(partition, axes if axes is not None else keep, name)
    if axes is not None:
        return chosen
    return tuple(axis for axis in range(partition.dim) if axis not in chosen)


def one_axis(
    partition: Partition,
    axes: int | Sequence[int] | None,
    keep: int | Sequence[int] | None,
    name: str,
) -> int:
    """Return the single axis meant by exactly one of `axes` and `keep`."""
    chosen = reduced_axes(partition, axes, keep, name)
    if len(chosen) != 1:
        raise PartitionError.because(
            f"{name} on {partition!r}",
            f"axes {list(chosen)}",
            f"{len(chosen)} != 1",
            f"one axis, e.g. {name}=0",
        )
    return chosen[0]


def chosen_axis(partition: Partition, axis: int, name: str) -> int:
    """Return one axis of a partition, counted from its front."""
    if as_int(axis) is None:
        raise PartitionError.because(
            f"{name}={axis!r} on {partition!r}",
            an(type(axis).__name__),
            None,
            f"an axis from 0 to {partition.dim - 1}, or a slice of them",
        )
    return _as_axes(partition, axis, name)[0]


def _as_axes(partition: Partition, axes: int | Sequence[int] | None, name: str) -> tuple[int, ...]:
    one = None if axes is None else as_int(axes)
    given = (one,) if one is not None else tuple(cast("Sequence[int] | None", axes) or ())
    turned = tuple(axis + partition.dim if axis < 0 else axis for axis in given)
    for axis in turned:
        if not 0 <= axis < partition.dim:
            raise PartitionError.because(
                f"{name}={list(given)} on {partition!r}",
                f"{partition.dim} dims",
                f"not 0 <= {axis} < {partition.dim}",
                f"axes from 0 to {partition.dim - 1}",
            )
    return tuple(sorted(set(turned)))

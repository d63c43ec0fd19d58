"""What a layer's plan depends on: shapes, dtypes and devices of the blocks of all its ranks.

A rank sees only its own block; `Table` is the agreed view of all, the same on every rank, and all
further planning is arithmetic on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, cast, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unisono.errors import CollectiveMismatch, PartitionError
from unisono.topology import Partition

Mode = Literal["always", "on_change", "off"]
_MODES: tuple[str, ...] = get_args(Mode)
Cuts = tuple[tuple[int, ...], ...]
"""For each dim, the cuts of a tensor's blocks."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What a plan depends on in one tensor of one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: Tensor) -> Structure:
        """Return the structure of a tensor."""
        return cls(tuple(x.shape), x.dtype, x.device.type)

    def zeros(self) -> Tensor:
        """Return a tensor of this structure."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Table:
    """The structures of one input on all ranks of a layer."""

    ranks: tuple[int, ...]
    """Ranks of the root communicator, ascending."""
    entries: tuple[Structure, ...]

    def of(self, rank: int) -> Structure:
        """Return the structure on a rank of the root communicator."""
        return self.entries[self.ranks.index(rank)]

    def shapes(self, partition: Partition) -> list[tuple[int, ...]]:
        """Return the shapes of the blocks of a partition, row-major."""
        return [self.of(rank).shape for rank in partition.ranks]

    def dtype(self, partition: Partition) -> torch.dtype:
        """Return the one dtype of the blocks of a partition."""
        found = {rank: self.of(rank).dtype for rank in partition.ranks}
        first = found[partition.ranks[0]]
        if any(dtype != first for dtype in found.values()):
            raise CollectiveMismatch.because(
                f"blocks of {partition!r}",
                "\n".join(f"rank {rank}: {dtype}" for rank, dtype in found.items()),
                "their dtypes differ",
                f"x.to({first}) on every rank",
            )
        return first

    def cuts(self, partition: Partition) -> Cuts:
        """Return the cuts of the blocks of a partition; they must form a grid."""
        shapes = self.shapes(partition)
        wrong = next((shape for shape in shapes if len(shape) != partition.dim), None)
        if wrong is not None:
            raise PartitionError.because(
                f"a block of shape {list(wrong)} on {partition!r}",
                self._listed(partition),
                f"{len(wrong)} tensor dims, {partition.dim} partition dims",
                "one partition size for each tensor dim; write 1 where a dim is not split",
            )
        cuts: list[tuple[int, ...]] = []
        for dim, parts in enumerate(partition.shape):
            sizes: list[int | None] = [None] * parts
            for place, shape in enumerate(shapes):
                i = partition.index_of(place)[dim]
                if sizes[i] is None:
                    sizes[i] = shape[dim]
                elif sizes[i] != shape[dim]:
                    raise PartitionError.because(
                        f"blocks of {partition!r}",
                        self._listed(partition),
                        f"dim {dim}, index {i}: {sizes[i]} and {shape[dim]} points",
                        "ranks with the same index in a dim must hold equally much of it",
                    )
            at = [0]
            for size in sizes:
                at.append(at[-1] + cast("int", size))
            cuts.append(tuple(at))
        return tuple(cuts)

    def global_shape(self, partition: Partition) -> tuple[int, ...]:
        """Return the shape of the whole tensor that the blocks of a partition make up."""
        return tuple(own[-1] for own in self.cuts(partition))

    def _listed(self, partition: Partition) -> str:
        return "\n".join(
            f"rank {rank}: {list(shape)}"
            for rank, shape in zip(partition.ranks, self.shapes(partition), strict=True)
        )


class structure_check:
    """Say how layers notice that a shape has changed: at once, or for a `with` block.

    `"always"` (default): ranks agree in every forward with one word, so a change that only some
    ranks see is planned anew on all. `"on_change"`: each rank acts on what it sees; free, and
    right when all ranks see a change together. `"off"`: the first plan is final.

    >>> with structure_check("off"):
    ...     current_mode()
    'off'
    """

    def __init__(self, mode: Mode) -> None:
        global _mode
        self._before: Mode | None = _mode
        _mode = _check(mode)

    def __enter__(self) -> None:
        """The mode is set already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        global _mode
        _mode = self._before


def current_mode() -> Mode:
    """Return the mode in force: set by `structure_check`, else `UNISONO_STRUCTURE_CHECK`."""
    if _mode is not None:
        return _mode
    return _check(os.environ.get("UNISONO_STRUCTURE_CHECK", "always"))


def _check(mode: str) -> Mode:
    if mode not in _MODES:
        raise PartitionError.because(
            f"structure_check({mode!r})", f"modes: {', '.join(map(repr, _MODES))}", None, '"always"'
        )
    return cast("Mode", mode)


_mode: Mode | None = None


def is_plain(x: object) -> bool:
    """Whether nothing but ordinary autograd looks on: no autocast, no transform, no tracing."""
    return (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )

"""Memory that one process would share and ranks do not: views that had to be moved.

Split tensors in one memory hold one `Memory`. Two of these are linked where torch would have one.
While both live, a change of either is refused: the other could not show it. Who lives follows from
the program, on all ranks alike; of storages that is not so, for messages hold them, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor

from unisono.errors import UnisonoError


class Memory:
    """The memory of a block; it lives as long as a split tensor in it."""

    __slots__ = ("__weakref__", "_links", "_tensors")

    def __init__(self) -> None:
        self._links: list[weakref.ref[Memory]] = []
        self._tensors: list[weakref.ref[Tensor]] = []

    def add(self, x: Tensor) -> None:
        """Take in a split tensor whose block lies here."""
        self._tensors = [other for other in self._tensors if other() is not None]
        self._tensors.append(weakref.ref(x))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the split tensors that lie here."""
        return (x for other in self._tensors if (x := other()) is not None)

    def link(self, moved: Memory) -> None:
        """Note that torch would not tell `moved` from this memory, nor from those linked to it."""
        self._links = [other for other in self._links if other() is not None]
        for one in (self, *[m for other in self._links if (m := other()) is not None]):
            if one is not moved:
                one._links.append(weakref.ref(moved))
                moved._links.append(weakref.ref(one))

    @property
    def is_linked(self) -> bool:
        """Whether linked memory lives."""
        return any(other() is not None for other in self._links)


def changed_in_place() -> UnisonoError:
    """Return the error for a change that linked memory would not show."""
    return UnisonoError.because(
        "an in-place change of a split tensor or of a view of it",
        "the view had to be moved between ranks, so the other one does not see the change",
        None,
        "the function without the underscore (x = x.mul(2)), or view.clone() first; "
        "x[...] = value for a part of x",
    )


def address(x: Tensor) -> int:
    """Return where a plain tensor lies; empty ones have a place, too."""
    return x.untyped_storage()._cdata

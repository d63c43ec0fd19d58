"""`RankRows`: what all datasets of rows on this rank share, and the transforms of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.data
from torch import Tensor

from unisono.comm import Communicator
from unisono.errors import explain

__all__ = ["RankRows", "Transforms"]

Transforms = Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None


class RankRows(torch.utils.data.Dataset[Any]):
    """A torch dataset over the rows in `data`, each transformed when it is read.

    Args:
        rows: this rank's rows.
        transforms: a callable, or several applied in order, for each row.
        comm: the ranks that hold the others.
    """

    def __init__(self, rows: Tensor, transforms: Transforms, comm: Communicator) -> None:
        _steps_of(transforms)  # refuses what cannot be called
        self.data = rows
        self.transforms = transforms
        self.communicator = comm
        self.comm: object = comm

    def __len__(self) -> int:
        """Number of rows on this rank."""
        return self.data.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return row `index` of this rank, transformed."""
        row = self.data[index]
        for step in _steps_of(self.transforms):
            row = step(row)
        return row

    def __getstate__(self) -> dict[str, Any]:
        """A loader's worker process reads rows; it is no rank, so the communicator stays behind."""
        return {**self.__dict__, "comm": None, "communicator": None}


def _steps_of(transforms: Transforms) -> tuple[Callable[[Any], Any], ...]:
    if transforms is None:
        return ()
    steps: tuple[Any, ...] = (
        tuple(transforms) if isinstance(transforms, list | tuple) else (transforms,)
    )
    if not all(callable(step) for step in steps):
        raise TypeError(
            explain(f"transforms={transforms!r}", "not callable", None, "a callable or a list")
        )
    return steps

"""HeAT's `utils.data`: loaders, data sets and shuffles over ranks."""

from __future__ import annotations

from typing import NoReturn

from unisono.compat.heat.utils.data import datatools
from unisono.compat.heat.utils.data.datatools import (
    DataLoader,
    Dataset,
    DistributedDataset,
    DistributedSampler,
    create_train_val_split,
    dataset_irecv,
    dataset_ishuffle,
    dataset_shuffle,
)

__all__ = [
    "DataLoader",
    "Dataset",
    "DistributedDataset",
    "DistributedSampler",
    "create_train_val_split",
    "dataset_irecv",
    "dataset_ishuffle",
    "dataset_shuffle",
    "datatools",
]


def __getattr__(name: str) -> NoReturn:
    """Say what is not offered."""
    raise AttributeError(
        f"{__name__} has no {name!r}; HeAT's readers of files (PartialH5Dataset, MNISTDataset) "
        "are not offered\n"
        "  HINT: load the rows of this rank and wrap them: ht.utils.data.Dataset(rows)"
    )

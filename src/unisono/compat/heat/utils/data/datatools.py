"""HeAT's `utils.data.datatools`."""

from __future__ import annotations

from unisono.data_parallel import (
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
]

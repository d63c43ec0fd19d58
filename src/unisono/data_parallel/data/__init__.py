"""Rows that are split over ranks: datasets, loaders, samplers and shuffles."""

from __future__ import annotations

from unisono.data_parallel.data.dataset import Dataset, DistributedDataset, shard
from unisono.data_parallel.data.loader import DataLoader
from unisono.data_parallel.data.sampler import DistributedSampler, create_train_val_split
from unisono.data_parallel.data.shuffle import dataset_irecv, dataset_ishuffle, dataset_shuffle

__all__ = [
    "DataLoader",
    "Dataset",
    "DistributedDataset",
    "DistributedSampler",
    "create_train_val_split",
    "dataset_irecv",
    "dataset_ishuffle",
    "dataset_shuffle",
    "shard",
]

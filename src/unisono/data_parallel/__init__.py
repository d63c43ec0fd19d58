"""The same training loop on many ranks: averaged gradients, averaged parameters, shared data.

`DASO` and its schedule, nodes and plateau detector; loaders, samplers and shuffles of data that is
split over ranks.
"""

from __future__ import annotations

from typing import NoReturn

from unisono.data_parallel.averaging import GradBucket
from unisono.data_parallel.bucket import Bucket
from unisono.data_parallel.daso.daso import DASO
from unisono.data_parallel.daso.multi_gpu import DataParallelMultiGPU
from unisono.data_parallel.daso.schedule import (
    BatchPlan,
    DasoSchedule,
    DetectMetricPlateau,
    Skips,
)
from unisono.data_parallel.dataset import (
    Dataset,
    DistributedDataset,
    dataset_irecv,
    dataset_ishuffle,
    dataset_shuffle,
    shard,
)
from unisono.data_parallel.engine import Stats
from unisono.data_parallel.loader import DataLoader, DistributedSampler, create_train_val_split
from unisono.data_parallel.nonblocking import DataParallelOptimizer
from unisono.data_parallel.wrapper import DataParallel
from unisono.removed import removed_name

__all__ = [
    "DASO",
    "BatchPlan",
    "Bucket",
    "DasoSchedule",
    "DataLoader",
    "DataParallel",
    "DataParallelMultiGPU",
    "DataParallelOptimizer",
    "Dataset",
    "DetectMetricPlateau",
    "DistributedDataset",
    "DistributedSampler",
    "GradBucket",
    "Skips",
    "Stats",
    "create_train_val_split",
    "dataset_irecv",
    "dataset_ishuffle",
    "dataset_shuffle",
    "shard",
]


def __getattr__(name: str) -> NoReturn:
    """Say of a name that is gone what to write instead."""
    raise removed_name(f"unisono.data_parallel.{name}")

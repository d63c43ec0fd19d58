"""HeAT's names for training: `import unisono.compat.heat as ht`, and the script runs.

Neural networks, optimizers, data loaders and the communicator are here, without MPI or a GPU being
needed. Of HeAT's array library only what training programs touch is: arrays whose rows are split.
For more keep heat and pass `x.larray`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unisono import data_parallel
from unisono.comm import mpi_style
from unisono.compat.heat import arrays, files, training
from unisono.compat.modules import Module, build

COMMUNICATION = (
    mpi_style,
    (
        "MPI MPI_SELF MPI_WORLD Communication MPICommunication MPIRequest=Request "
        "get_comm sanitize_comm use_comm"
    ),
)
DATA = (
    (files, "DataLoader"),
    (data_parallel, "Dataset DistributedDataset DistributedSampler create_train_val_split"),
    (data_parallel, "dataset_irecv dataset_ishuffle dataset_shuffle"),
)
ARRAYS = (arrays, "DNDarray array resplit use_device")
TYPES = (torch, "bool_=bool float16 float32 float64 int8 int16 int32 int64 uint8")
__version__ = "1.5.1"
WRAPPERS = (training, "DataParallel DataParallelMultiGPU")
OPTIMIZERS = ((training, "DASO"), (data_parallel, "DataParallelOptimizer"))

MODULES = {
    "": Module(
        "",
        COMMUNICATION,
        ARRAYS,
        TYPES,
        same={"communication": "core.communication"},
    ),
    "core": Module("The part of HeAT's `core` that is offered.", COMMUNICATION, ARRAYS, TYPES),
    "core.communication": Module("HeAT's `core.communication`: MPI's verbs.", COMMUNICATION),
    "core.dndarray": Module("HeAT's `core.dndarray`: rows that are split.", (arrays, "DNDarray")),
    "core.factories": Module("HeAT's `core.factories`: arrays.", (arrays, "array")),
    "core.types": Module("HeAT's `core.types`: those of torch.", TYPES),
    "nn": Module(
        "HeAT's `nn`: the data-parallel wrappers; every other name is that of `torch.nn`.",
        WRAPPERS,
        rest="torch.nn",
    ),
    "nn.data_parallel": Module("HeAT's `nn.data_parallel`: the wrappers.", WRAPPERS),
    "nn.functional": Module(
        "HeAT's `nn.functional`: every name is that of `torch.nn.functional`.",
        rest="torch.nn.functional",
    ),
    "optim": Module(
        "HeAT's `optim`: the data-parallel optimizers; every other name is that of `torch.optim`.",
        *OPTIMIZERS,
        rest="torch.optim",
    ),
    "optim.dp_optimizer": Module("HeAT's `optim.dp_optimizer`: the optimizers.", *OPTIMIZERS),
    "optim.lr_scheduler": Module(
        "HeAT's `optim.lr_scheduler`: every name is that of `torch.optim.lr_scheduler`.",
        rest="torch.optim.lr_scheduler",
    ),
    "optim.utils": Module("HeAT's `optim.utils`.", (data_parallel, "DetectMetricPlateau")),
    "utils": Module("The part of HeAT's `utils` that is offered: data, torchvision's transforms."),
    "utils.data": Module(
        "HeAT's `utils.data`: loaders, data sets and shuffles over ranks.",
        *DATA,
    ),
    "utils.data._utils": Module(
        "HeAT's `utils.data._utils`: indices of TFRecord files.",
        (files, "dali_tfrecord2idx"),
        instead={"merge_files_imagenet_tfrecord": "tensorflow's own reader, and h5py"},
    ),
    "utils.data.datatools": Module("HeAT's `utils.data.datatools`: the same names.", *DATA),
    "utils.data.mnist": Module("HeAT's `utils.data.mnist`.", (files, "MNISTDataset")),
    "utils.data.partial_dataset": Module(
        "HeAT's `utils.data.partial_dataset`: windows of a file.", (files, "PartialH5Dataset")
    ),
    "utils.vision_transforms": Module(
        "HeAT's `utils.vision_transforms`: `torchvision.transforms`, loaded at the first name.",
        rest="torchvision.transforms",
    ),
}

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # names that the table makes


build(__name__, MODULES)

"""HeAT's names for training: `import unisono.compat.heat as ht`, and the script runs.

Neural networks, optimizers, data loaders and the communicator are here, without MPI or a GPU being
needed. HeAT's array library is not: keep heat for arrays and pass `x.larray`.
"""

from __future__ import annotations

from unisono import data_parallel
from unisono.comm import mpi_style
from unisono.compat.heat import training
from unisono.compat.modules import Module, build

COMMUNICATION = (
    mpi_style,
    (
        "MPI MPI_SELF MPI_WORLD Communication MPICommunication MPIRequest=Request "
        "get_comm sanitize_comm use_comm"
    ),
)
DATA = (
    data_parallel,
    (
        "DataLoader Dataset DistributedDataset DistributedSampler create_train_val_split "
        "dataset_irecv dataset_ishuffle dataset_shuffle"
    ),
)
WRAPPERS = (training, "DataParallel DataParallelMultiGPU")
OPTIMIZERS = ((training, "DASO"), (data_parallel, "DataParallelOptimizer"))

MODULES = {
    "": Module("", COMMUNICATION, same={"communication": "core.communication"}, version="1.5.1"),
    "core": Module("The part of HeAT's `core` that is offered: the communicator.", COMMUNICATION),
    "core.communication": Module("HeAT's `core.communication`: MPI's verbs.", COMMUNICATION),
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
        DATA,
        hint="HeAT's readers of files are not offered; load the rows of this rank and wrap them: "
        "ht.utils.data.Dataset(rows)",
    ),
    "utils.data.datatools": Module("HeAT's `utils.data.datatools`: the same names.", DATA),
    "utils.vision_transforms": Module(
        "HeAT's `utils.vision_transforms`: `torchvision.transforms`, loaded at the first name.",
        rest="torchvision.transforms",
    ),
}

build(__name__, "heat", MODULES)

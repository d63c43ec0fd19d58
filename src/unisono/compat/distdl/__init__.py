"""DistDL's names: `import unisono.compat.distdl as distdl`, and the script runs.

Over mpi4py communicators and torch process groups, with neither MPI nor a compiler being needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.compat.distdl import (
    blocks,
    config,
    functions,
    halos,
    layers,
    partitions,
    structures,
)
from unisono.compat.modules import Module, build

_LAYERS = {
    "all_gather": "AllGather",
    "all_sum_reduce": "AllSumReduce",
    "batchnorm": "DistributedBatchNorm",
    "broadcast": "Broadcast",
    "conv": "DistributedConv1d DistributedConv2d DistributedConv3d",
    "conv_channel": "DistributedChannelConv1d DistributedChannelConv2d DistributedChannelConv3d",
    "conv_feature": "DistributedFeatureConv1d DistributedFeatureConv2d DistributedFeatureConv3d "
    "DistributedFeatureConvTranspose1d DistributedFeatureConvTranspose2d "
    "DistributedFeatureConvTranspose3d",
    "conv_general": "DistributedGeneralConv1d DistributedGeneralConv2d DistributedGeneralConv3d",
    "embedding": "DistributedEmbedding",
    "embedding_zero": "DistributedEmbeddingZero",
    "interpolate": "Interpolate",
    "layernorm": "DistributedLayerNorm",
    "layernorm_zero": "DistributedLayerNormZero",
    "linear": "DistributedLinear",
    "linear_ag": "DistributedLinearAllGather",
    "linear_ag_zero": "DistributedLinearAllGatherZero",
    "linear_rs": "DistributedLinearReduceScatter",
    "linear_rs_zero": "DistributedLinearReduceScatterZero",
    "loss": "DistributedBCELoss DistributedBCEWithLogitsLoss DistributedCrossEntropyLoss "
    "DistributedKLDivLoss DistributedL1Loss DistributedMSELoss DistributedNLLLoss "
    "DistributedPoissonNLLLoss",
    "module": "Module",
    "pooling": "DistributedAvgPool1d DistributedAvgPool2d DistributedAvgPool3d "
    "DistributedMaxPool1d DistributedMaxPool2d DistributedMaxPool3d",
    "reduce_scatter": "ReduceScatter",
    "repartition": "Repartition",
    "rmsnorm_zero": "DistributedRMSNormZero",
    "sum_reduce": "SumReduce",
    "transpose": "DistributedTranspose=Repartition",
    "upsampling": "DistributedUpsample",
}
"""Module of `distdl.nn` -> its layers."""
_MIXINS = {
    "conv_mixin": (halos, "ConvMixin"),
    "halo_mixin": (halos, "HaloMixin"),
    "interpolate_mixin": (halos, "InterpolateMixin"),
    "pooling_mixin": (halos, "PoolingMixin"),
}
_FUNCTIONS = {
    "all_sum_reduce": (functions, "AllSumReduceFunction"),
    "broadcast": (functions, "BroadcastFunction"),
    "halo_exchange": (halos, "HaloExchangeFunction"),
    "repartition": (functions, "RepartitionFunction"),
    "sum_reduce": (functions, "SumReduceFunction"),
}
_STRUCTURES = (structures, "assemble_global_tensor_structure broadcast_tensor_structure")
_CORRECTOR = (functions, "ZeroVolumeCorrectorFunction")

__version__ = "0.5.0"

MODULES = {
    "": Module(""),
    "backend": Module("The back end in use.", same={"backend": "backends.mpi"}),
    "backends": Module("There is one, named after MPI, which is one of the networks it runs on."),
    "backends.mpi": Module(
        "Partitions, buffers, autograd functions, structures of tensors.",
        (partitions, "CartesianPartition=MPICartesianPartition Partition=MPIPartition"),
        (structures, "BufferManager=MPIBufferManager ExpandableBuffer=MPIExpandableBuffer"),
        _STRUCTURES,
        computed={"operation_map": partitions.operations},
    ),
    "backends.mpi.buffer": Module(
        "Memory that grows on demand; layers here bring their own.",
        (structures, "MPIBufferManager MPIExpandableBuffer"),
    ),
    "backends.mpi.compare": Module(
        "Whether two communicators or groups are the same, or null.",
        (partitions, "check_identical_comm check_identical_group"),
        (partitions, "check_null_comm check_null_group check_null_rank"),
    ),
    "backends.mpi.functional": Module("Movements of data as functions with their adjoints."),
    "backends.mpi.halo_exchange": Module(
        "Buffers for bulk and ghosts of each dim.", (structures, "allocate_halo_exchange_buffers")
    ),
    "backends.mpi.partition": Module(
        "Teams of ranks, with or without a grid.",
        (partitions, "MPICartesianPartition MPIPartition layout_of"),
    ),
    "backends.mpi.repartition": Module(
        "Buffers for the boxes that change hands.", (structures, "allocate_repartition_buffers")
    ),
    "backends.mpi.tensor_comm": Module("What a split tensor looks like as a whole.", _STRUCTURES),
    "backends.mpi.tensor_decomposition": Module(
        "The blocks of all workers, as they are.",
        (structures, "compute_subtensor_shapes_unbalanced"),
    ),
    "config": config,
    "functional": Module("Functions without communication.", _CORRECTOR),
    "functional.interpolate": Module(
        "The local part of an upsampling.", (functions, "InterpolateFunction")
    ),
    "functional.zero_volume_corrector": Module(
        "Something to call `backward()` on, everywhere.", _CORRECTOR
    ),
    "nn": Module(
        "Every layer, with its arguments and defaults, over the layers of `unisono.nn`.",
        (halos, "HaloExchange"),
        *((layers, names) for names in _LAYERS.values()),
        instead={
            "DistributedPad": "unisono.nn.DistributedPad"
            "(backends.mpi.partition.layout_of(P_x), padding)",
            "PadNd": "torch.nn.functional.pad, or padding= of the layer",
            "UnpadNd": "slices of the tensor",
        }
        | {
            f"DistributedChannel{how}Conv{transpose}{dims}d": "DistributedChannelConv with P_x, "
            "P_y and P_w; or an ordinary network on a split tensor, unisono.nn.Split"
            for how in ("AllGather", "ReduceScatter")
            for transpose in ("", "Transpose")
            for dims in (1, 2, 3)
        },
    ),
    "nn.halo_exchange": Module("Ghosts of a padded tensor.", (halos, "HaloExchange")),
    "nn.mixins": Module(
        "The arithmetic of halos, for user-defined layers. All pure.", *_MIXINS.values()
    ),
    "utilities": Module("Index arithmetic, structures of tensors, and small things around them."),
    "utilities.debug": Module("Prints of all ranks in order.", (partitions, "print_sequential")),
    "utilities.dtype": Module(
        "Tables between dtypes of numpy, of torch, and numpy's numbers.",
        (structures, "intID_to_numpy_dtype_dict intID_to_torch_dtype_dict"),
        (structures, "numpy_to_intID_dtype_dict numpy_to_torch_dtype_dict"),
        (structures, "torch_to_intID_dtype_dict torch_to_numpy_dtype_dict"),
    ),
    "utilities.index_tricks": Module(
        "The number of an index in a grid.", (blocks, "cartesian_index_c cartesian_index_f")
    ),
    "utilities.misc": Module(
        "A dict with attributes, and a stand-in for autograd's `ctx`.",
        (structures, "Bunch DummyContext"),
    ),
    "utilities.slicing": Module(
        "Balanced blocks, their intersections, and walks over an index grid.",
        (blocks, "compute_subshape compute_start_index compute_stop_index compute_intersection"),
        (blocks, "compute_partition_intersection compute_nd_slice_shape compute_nd_slice_volume"),
        (blocks, "assemble_index_filter assemble_slices filtered_range_index range_index"),
        (blocks, "worker_layout"),
    ),
    "utilities.tensor_decomposition": Module(
        "The blocks of all workers as arrays over their grid.",
        (blocks, "compute_subtensor_shapes_balanced compute_subtensor_intersection_slice"),
        (blocks, "compute_subtensor_start_indices compute_subtensor_stop_indices"),
    ),
    "utilities.torch": Module(
        "Tensors without elements, and what a plan knows of a tensor.",
        (structures, "TensorStructure distdl_padding_to_torch_padding zero_volume_tensor"),
    ),
}
MODULES |= {f"nn.{path}": Module("Layers.", (layers, names)) for path, names in _LAYERS.items()}
MODULES |= {f"nn.mixins.{path}": Module("Mixin.", mixin) for path, mixin in _MIXINS.items()}
MODULES |= {
    f"backends.mpi.functional.{path}": Module("Function.", source)
    for path, source in _FUNCTIONS.items()
}

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...  # names that the table makes


layers.Module._distdl_backend = build(__name__, MODULES)["backends.mpi"]
config.set_backend()

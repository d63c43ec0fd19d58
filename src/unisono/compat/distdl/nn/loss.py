"""DistDL's `nn.loss`: `reduction` is the second argument of each.

The value is that of the whole tensors, on every rank of `P_x`; DistDL has it on the first and 0.0
on the others. Either way each rank calls `backward()` once.
"""

from __future__ import annotations

from torch import Tensor

from unisono import nn as ours
from unisono.topology import Partition

from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = [
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedCrossEntropyLoss",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedMSELoss",
    "DistributedNLLLoss",
    "DistributedPoissonNLLLoss",
]


class DistributedL1Loss(ours.DistributedL1Loss, Module):
    """`torch.nn.L1Loss` of split tensors."""

    def __init__(self, P_x: MPIPartition | Partition, reduction: str = "mean") -> None:
        super().__init__(layout_of(P_x), reduction)


class DistributedMSELoss(ours.DistributedMSELoss, Module):
    """`torch.nn.MSELoss` of split tensors."""

    def __init__(self, P_x: MPIPartition | Partition, reduction: str = "mean") -> None:
        super().__init__(layout_of(P_x), reduction)


class DistributedPoissonNLLLoss(ours.DistributedPoissonNLLLoss, Module):
    """`torch.nn.PoissonNLLLoss` of split tensors."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        reduction: str = "mean",
        *,
        log_input: bool = True,
        full: bool = False,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(layout_of(P_x), log_input, full, eps, reduction)


class DistributedBCELoss(ours.DistributedBCELoss, Module):
    """`torch.nn.BCELoss` of split tensors; `weight` fits the own block."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__(layout_of(P_x), weight, reduction)


class DistributedBCEWithLogitsLoss(ours.DistributedBCEWithLogitsLoss, Module):
    """`torch.nn.BCEWithLogitsLoss` of split tensors; the weights fit the own block."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
    ) -> None:
        super().__init__(layout_of(P_x), weight, reduction, pos_weight)


class DistributedKLDivLoss(ours.DistributedKLDivLoss, Module):
    """`torch.nn.KLDivLoss` of split tensors."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        reduction: str = "mean",
        *,
        log_target: bool = False,
    ) -> None:
        super().__init__(layout_of(P_x), reduction, log_target)


class DistributedNLLLoss(ours.DistributedNLLLoss, Module):
    """`torch.nn.NLLLoss` of split tensors; the classes (dim 1) may be split too."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(layout_of(P_x), weight, ignore_index, reduction)


class DistributedCrossEntropyLoss(ours.DistributedCrossEntropyLoss, Module):
    """`torch.nn.CrossEntropyLoss` of split tensors; the classes (dim 1) may be split too."""

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        reduction: str = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(layout_of(P_x), weight, ignore_index, reduction, label_smoothing)

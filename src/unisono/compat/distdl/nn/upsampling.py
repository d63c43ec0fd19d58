"""DistDL's `nn.upsampling`: `size` is that of the whole tensor, with batch and channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono import nn as ours
from unisono.errors import PartitionError, explain
from unisono.nn.structure import Table
from unisono.topology import Partition

from ..backends.mpi.buffer import MPIBufferManager, manager_or_new
from ..backends.mpi.partition import MPIPartition, layout_of
from .module import Module

__all__ = ["DistributedUpsample"]

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


class DistributedUpsample(ours.DistributedUpsample, Module):
    """`torch.nn.Upsample` of a tensor `(N, C, ...)` split in any dims.

    Args:
        P_x: partition of the input.
        buffer_manager: kept; layers bring their own memory.
        size: sizes of the whole output, with batch and channels; or
        scale_factor: by how much each spatial dim grows. Exactly one of the two.
        mode: "linear" in as many dims as there are, "nearest", "cubic" (2 spatial dims only).
        align_corners: as in torch; not for "nearest".
    """

    def __init__(
        self,
        P_x: MPIPartition | Partition,
        buffer_manager: MPIBufferManager | None = None,
        size: Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "linear",
        align_corners: bool = False,
    ) -> None:
        layout = layout_of(P_x)
        space = layout.dim - 2
        if mode == "cubic" and space != 2:
            raise NotImplementedError(
                explain(
                    'DistributedUpsample(mode="cubic")',
                    f"{space} spatial dims",
                    f"{space} != 2",
                    'mode="linear"',
                )
            )
        if size is not None and len(size) != layout.dim:
            raise PartitionError.because(
                f"DistributedUpsample(size={list(size)})",
                f"a partition of {layout.dim} dims",
                f"{len(size)} != {layout.dim}",
                "the whole shape, with batch and channels",
            )
        torchs = {"linear": _LINEAR.get(space, mode), "cubic": "bicubic"}.get(mode, mode)
        is_nearest = torchs.startswith("nearest")
        super().__init__(
            layout,
            None if size is None else tuple(int(n) for n in size[2:]),
            scale_factor,
            torchs,
            None if is_nearest and not align_corners else align_corners,
        )
        self.buffer_manager = manager_or_new(buffer_manager)
        self._kept = None if size is None else tuple(int(n) for n in size[:2])

    def _make_plan(self, tables: Sequence[Table]) -> Any:
        found = tables[0].global_shape(self.P_x)[:2]
        if self._kept is not None and found != self._kept:
            raise PartitionError.because(
                f"DistributedUpsample(size={[*self._kept, *(self.size or ())]})",
                f"batch and channels of the input: {list(found)}",
                f"{list(found)} != {list(self._kept)}",
                "only spatial sizes change",
            )
        return super()._make_plan(tables)

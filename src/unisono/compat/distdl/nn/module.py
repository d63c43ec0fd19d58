"""DistDL's `nn.module`: the base of layers, which sees this package's partitions."""

from __future__ import annotations

from typing import Any

from unisono import nn as ours
from unisono.topology import Partition

from ..backend import backend
from ..backends.mpi.partition import MPIPartition

__all__ = ["Module"]


class Module(ours.Module):
    """A torch module that is set up lazily, together with the other ranks.

    A layer of your own overrides some of `_distdl_module_requires_reset(input)`,
    `_distdl_input_changed(input)`, `_distdl_module_teardown(input)` and
    `_distdl_module_setup(input)`, which are called in this order. All ranks of all partitions among
    its attributes decide together, so a change that one rank alone sees is met by all.
    """

    _distdl_backend: Any = backend

    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions over which set-up is collective: those among the attributes."""
        layouts = (
            value._layout if isinstance(value, MPIPartition) else value
            for value in self.__dict__.values()
        )
        return tuple(layout for layout in layouts if isinstance(layout, Partition))

"""The plans of the communicator-level operators: ints, ranks and the communicator, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unisono.comm import Communicator
from unisono.comm.arguments import check_dim, check_sizes, check_tensor
from unisono.errors import PartitionError, UnisonoError, an, explain


@dataclass(frozen=True)
class GroupPlan:
    """A movement that needs to know only the group."""

    comm: Communicator
    wire: torch.dtype | None = None
    """Dtype in which the tensor travels, None for its own."""
    landed: Tensor | None = field(default=None, compare=False)
    """The result, where it has travelled before."""

    @property
    def adjoint(self) -> GroupPlan:
        """The plan of the adjoint."""
        return self if self.landed is None else replace(self, landed=None)

    @property
    def tangent(self) -> GroupPlan:
        """The plan for a tangent, which has not travelled yet."""
        return self.adjoint


@dataclass(frozen=True)
class RootPlan:
    """A movement between one rank and all, of whole tensors."""

    comm: Communicator
    root: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def adjoint(self) -> RootPlan:
        """The plan of the adjoint."""
        return self


@dataclass(frozen=True)
class BlockPlan:
    """A movement of blocks along one dim; rank r holds `sizes[r]` of it."""

    comm: Communicator
    dim: int
    sizes: tuple[int, ...]
    root: int | None = None
    shape: tuple[int, ...] = ()
    """Shape of this rank's block (kept where a root holds the whole)."""
    dtype: torch.dtype = torch.float32
    """Dtype of the blocks (kept where a root holds the whole)."""
    landed: Tensor | None = field(default=None, compare=False)
    """The result, where it has travelled before."""

    @property
    def adjoint(self) -> BlockPlan:
        """The plan of the adjoint."""
        return self if self.landed is None else replace(self, landed=None)

    @property
    def tangent(self) -> BlockPlan:
        """The plan for a tangent, which has not travelled yet."""
        return self.adjoint


def check_comm(comm: object, verb: str) -> Communicator:
    """Return `comm` if it is a communicator, else raise a `TypeError` that tells how to get one."""
    if isinstance(comm, Communicator):
        return comm
    is_group = isinstance(comm, dist.ProcessGroup | DeviceMesh)
    raise TypeError(
        explain(
            f"{verb}(..., comm={comm!r})",
            "no communicator" if comm is None else f"{an(type(comm).__name__)}, no Communicator",
            None,
            f"comm={'Communicator.of(group)' if is_group else 'unisono.world()'}",
        )
    )


def block_plan(
    x: Tensor, dim: int, sizes: Sequence[int] | None, comm: Communicator, verb: str
) -> BlockPlan:
    """Return the plan for joining blocks: `x` is this rank's. Collective when `sizes` is None."""
    check_comm(comm, verb)
    check_tensor(x, comm.device, verb)
    if x.dim() == 0:
        raise PartitionError.because(
            f"{verb} of a tensor without dims", "nothing to join along", None, "x.reshape(1)"
        )
    dim = check_dim(dim, x, verb)
    if sizes is None:
        if comm.size == 1:
            return BlockPlan(comm, dim, (x.shape[dim],))
        if torch.compiler.is_compiling():
            raise _unknown_lengths(x, dim, comm, verb)
        return BlockPlan(comm, dim, comm.block_lengths(x, dim))
    given = check_sizes(sizes, comm.size, verb)
    if given[comm.rank] != x.shape[dim]:
        raise PartitionError.because(
            f"{verb}(sizes={list(given)}, dim={dim}) on rank {comm.rank}",
            f"a block of shape {list(x.shape)}",
            f"sizes[{comm.rank}] = {given[comm.rank]} != {x.shape[dim]}",
        )
    return BlockPlan(comm, dim, given)


def _unknown_lengths(x: Tensor, dim: int, comm: Communicator, verb: str) -> UnisonoError:
    """Return the error of a join in a compiled graph; torch quotes it in its own."""
    return PartitionError.because(
        f"{verb} without sizes inside torch.compile(fullgraph=True)",
        f"a block of shape {list(x.shape)}; how long those of the other {comm.size - 1} ranks are "
        "along the joined dim is learned by an exchange, and a graph must know it before",
        f"{x.shape[dim]} + the lengths of {comm.size - 1} other blocks = ?",
        "sizes=[...], the length of each rank's block; natoms=N for the balanced split of N",
    )


def whole_plan(
    x: Tensor, dim: int, sizes: Sequence[int] | None, comm: Communicator, verb: str
) -> BlockPlan:
    """Return the plan for cutting: `x` is whole along `dim`. Local; balanced without `sizes`."""
    check_comm(comm, verb)
    check_tensor(x, comm.device, verb)
    if x.dim() == 0:
        raise PartitionError.because(
            f"{verb} of a tensor without dims", "nothing to cut along", None, "x.reshape(1)"
        )
    dim = check_dim(dim, x, verb)
    rows = x.shape[dim]
    if sizes is None:
        share, rest = divmod(rows, comm.size)
        return BlockPlan(comm, dim, tuple(share + (r < rest) for r in range(comm.size)))
    return BlockPlan(comm, dim, check_sizes(sizes, comm.size, verb, total=rows))

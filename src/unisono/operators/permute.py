"""`permute`: each rank's tensor goes to one other rank. The adjoint is the inverse permutation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_tensor, whole_numbers
from unisono.comm.blocks import pack_shape, unpack_shape
from unisono.errors import CollectiveMismatch, MeshError
from unisono.operators.linear import LinearMap, identity
from unisono.operators.plans import check_comm


@dataclass(frozen=True)
class PermutePlan:
    """Where each rank's tensor goes, and the shape each rank holds before and after."""

    comm: Communicator
    destination: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def adjoint(self) -> PermutePlan:
        """The plan of the way back."""
        inverse = [0] * len(self.destination)
        shapes: list[tuple[int, ...]] = [()] * len(self.destination)
        for source, target in enumerate(self.destination):
            inverse[target] = source
            shapes[target] = self.shapes[source]
        return PermutePlan(self.comm, tuple(inverse), tuple(shapes), self.dtype)


class Permute(LinearMap):
    """My tensor goes to rank `destination[me]`."""

    @staticmethod
    def kernel(x: Tensor, plan: PermutePlan) -> Tensor:
        """See `LinearMap`."""
        me = plan.comm.rank
        source = plan.destination.index(me)
        got = plan.comm.exchange(
            {plan.destination[me]: x}, {source: (plan.shapes[source], plan.dtype)}
        )
        return got[source]


Permute.adjoint = Permute


def permute(
    x: Tensor, destination: Sequence[int] | Callable[[int], int], *, comm: Communicator
) -> Tensor:
    """Return the tensor of the rank whose destination is this one; gradients go the way back.

    Collective over `comm`. Shapes may differ between ranks; one small exchange learns them.

    Args:
        x: this rank's tensor.
        destination: for each rank the rank that gets its tensor (a list or a function), a
            permutation, the same on every rank. `lambda r: (r + 1) % comm.size` is a ring.
        comm: the ranks.
    """
    check_comm(comm, "permute")
    check_tensor(x, comm.device, "permute")
    given = [destination(r) for r in range(comm.size)] if callable(destination) else destination
    targets = whole_numbers(given)
    if targets is None or sorted(targets) != list(range(comm.size)):
        raise MeshError.because(
            f"permute(destination={given!r})",
            f"{comm.size} ranks",
            "each rank must be named exactly once",
            "lambda r: (r + 1) % comm.size",
        )
    if comm.size == 1:
        return identity(x)
    records = comm.all_gather_ints([*targets, *pack_shape(x.shape, x.dtype)])
    if any(record[: comm.size] != targets for record in records):
        named = {r: f"destination {list(rec[: comm.size])}" for r, rec in enumerate(records)}
        raise CollectiveMismatch("permute with different destinations: " + str(named), named)
    shapes = tuple(unpack_shape(record[comm.size :])[0] for record in records)
    return Permute.apply(x, PermutePlan(comm, targets, shapes, x.dtype))

"""What the operators share: checks at their edge, and what ranks tell each other.

A plan holds ints, ranks and the communicator, no tensor to differentiate; each operator's plan is
beside it, but for `GroupPlan`, which needs to know only the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unisono.comm import Communicator
from unisono.comm.arguments import check_not_vmapped, check_tensor, pack_shape, unpack_shape
from unisono.comm.collectives import Like
from unisono.errors import PartitionError, UnisonoError, an, explain


@dataclass(frozen=True)
class GroupPlan:
    """A movement that needs to know only the group."""

    comm: Communicator


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


def check_call(x: Tensor, comm: Communicator, verb: str) -> None:
    """Raise unless `comm` is a communicator and `x` a tensor that it can move."""
    if not isinstance(comm, Communicator):
        check_comm(comm, verb)
    check_tensor(x, comm._device_for(x), verb)


def announce(
    x: Tensor | None,
    src: int,
    numbers: Sequence[int],
    comm: Communicator,
    verb: str,
    refused: UnisonoError | None = None,
) -> tuple[tuple[int, ...], torch.dtype, bool, tuple[int, ...]]:
    """Tell all ranks what `src` holds; raise on all of them if it cannot be right.

    Args:
        x: the tensor on `src`, anything elsewhere.
        src: rank of `comm` that announces.
        numbers: further integers of `src`; as many on every rank.
        comm: the ranks.
        verb: for messages.
        refused: an error `src` has already found.

    Returns:
        Shape, dtype, whether a gradient is wanted, and `numbers`, all of `src`.
    """
    if isinstance(x, Tensor):
        check_not_vmapped(x, verb)  # so it is on every rank
    if comm.rank == src and refused is None:
        try:
            check_tensor(x, comm.device, verb)
        except UnisonoError as error:
            refused = error
    tensor = x if comm.rank == src and refused is None and x is not None else torch.empty(0)
    needs_grad = tensor.requires_grad and torch.is_grad_enabled()
    shape = pack_shape(tensor.shape, tensor.dtype)
    record = [int(refused is not None), int(needs_grad), *shape, *numbers]
    received = comm.all_gather_ints(record)[src]
    if refused is not None:
        raise refused
    if received[0]:
        raise PartitionError.because(
            f"{verb} from rank {src} of the group",
            "that rank refused its arguments; its own error says why",
        )
    cut = len(record) - len(numbers)
    return *unpack_shape(received[2:cut]), bool(received[1]), received[cut:]


def anchor(
    dtype: torch.dtype, needs_grad: bool, comm: Communicator, candidate: Tensor | None = None
) -> Tensor:
    """Return an input without elements that ties a rank's output to the graph.

    `candidate` is it, if it has no elements and the right dtype.
    """
    if candidate is not None and candidate.numel() == 0 and candidate.dtype == dtype:
        return candidate
    wants = needs_grad and torch.is_grad_enabled() and (dtype.is_floating_point or dtype.is_complex)
    return torch.empty(0, dtype=dtype, device=comm.device, requires_grad=wants)


def like_of(like: Like) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of something to imitate."""
    if isinstance(like, Tensor):
        return tuple(like.shape), like.dtype
    shape, dtype = like
    return tuple(shape), dtype

"""What ranks must know before a movement from one of them: shape, dtype, sizes, gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.arguments import check_not_vmapped, check_tensor
from unisono.comm.blocks import pack_shape, unpack_shape
from unisono.comm.collectives import Like
from unisono.errors import PartitionError, UnisonoError


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
    told = x if comm.rank == src and refused is None and x is not None else torch.empty(0)
    needs_grad = told.requires_grad and torch.is_grad_enabled()
    record = [
        int(refused is not None),
        int(needs_grad),
        *pack_shape(told.shape, told.dtype),
        *numbers,
    ]
    received = comm.all_gather_ints(record)[src]
    if refused is not None:
        raise refused
    if received[0]:
        raise PartitionError.because(
            f"{verb} from rank {src} of the group",
            "that rank refused its arguments; its own error says why",
        )
    cut = len(record) - len(numbers)
    shape, dtype = unpack_shape(received[2:cut])
    return shape, dtype, bool(received[1]), received[cut:]


def anchor(
    dtype: torch.dtype, needs_grad: bool, comm: Communicator, given: Tensor | None = None
) -> Tensor:
    """Return an input without elements that ties a rank's output to the graph.

    `given` is it, if it has no elements and the right dtype.
    """
    if given is not None and given.numel() == 0 and given.dtype == dtype:
        return given
    wants = needs_grad and torch.is_grad_enabled() and (dtype.is_floating_point or dtype.is_complex)
    return torch.empty(0, dtype=dtype, device=comm.device, requires_grad=wants)


def like_of(like: Like) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of something to imitate."""
    if isinstance(like, Tensor):
        return tuple(like.shape), like.dtype
    shape, dtype = like
    return tuple(shape), dtype

"""The ranks of a wrapper, and many tensors in one message to them.

What `comm` may be is decided here for the whole package. Tensors that travel together are joined,
sent and written back; the caller's tensors keep their memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.mpi_style import get_comm
from unisono.errors import UnisonoError, explain
from unisono.expect import one_line


def communicator_of(comm: object) -> Communicator:
    """Return the communicator that `comm` names; None is the world, or what `use_comm` set. Local.

    A `Communicator` is used as it is, so that a subclass keeps its own behaviour. Where a launcher
    started this process as a rank and nobody has joined its world yet, None joins it (collective).

    Raises:
        TypeError: it names no group of ranks.
    """
    if isinstance(comm, Communicator):
        return comm
    try:
        return Communicator.of(get_comm() if comm is None else comm)
    except UnisonoError as error:
        if isinstance(error, ValueError):
            raise
        raise TypeError(
            explain(
                f"comm={one_line(comm)}",
                f"{type(comm).__name__}, which names no group of ranks",
                hint="None, a Communicator, an MPICommunication or a ProcessGroup",
            )
        ) from None


def on_device(comm: Communicator, device: torch.device) -> Communicator:
    """Return `comm` for tensors on `device`."""
    return comm if comm.device.type == device.type else comm.with_device(device)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Communicator, src: int = 0) -> int:
    """Overwrite tensors with those of rank `src`, in one message per device. Collective.

    Returns:
        Bytes of the messages.
    """
    if comm.size == 1:
        return 0
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for x in tensors:
        if x.numel():
            by_device[x.device].append(_without_repetitions(x.detach()))
    sent = 0
    for device, members in by_device.items():
        # Wide elements first: each part then begins where its dtype may begin.
        members.sort(key=lambda x: -x.element_size())
        flat = torch.cat([x.reshape(-1).view(torch.uint8) for x in members])
        on_device(comm, device).broadcast_(flat, src)
        sent += flat.numel()
        if comm.rank != src:
            sizes = [x.numel() * x.element_size() for x in members]
            for x, part in zip(members, flat.split(sizes), strict=True):
                x.copy_(part.view(x.dtype).view(x.shape))
    return sent


def average_tensors(tensors: Iterable[Tensor], comm: Communicator) -> None:
    """Replace tensors by their means, in one message per device and dtype. Collective."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for x in tensors:
        kinds[x.device, x.dtype].append(x)
    for (device, _), members in kinds.items():
        flat = flatten(members)
        on_device(comm, device).all_reduce_(flat, "mean")
        write_back(flat, members)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return the real values of tensors of one dtype behind each other, as a new tensor."""
    return torch.cat([real_view(x).reshape(-1) for x in tensors])


@torch.no_grad()
def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with the values that `flatten` would take from them."""
    targets = [real_view(x) for x in tensors]
    for target, part in zip(targets, flat.split([x.numel() for x in targets]), strict=True):
        target.copy_(part.view(target.shape))


def real_view(x: Tensor) -> Tensor:
    """Return a view without history, with a last dim of two where `x` is complex."""
    x = x.detach()
    return torch.view_as_real(x) if x.is_complex() else x


def _without_repetitions(x: Tensor) -> Tensor:
    """Return a view of what `expand` has repeated only once, so that it can be written to."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x

"""The ranks of a wrapper: who they are, many tensors in one message, the same module on all.

What `comm` may be is decided here for the whole package. Tensors that travel together are joined,
sent and written back; the caller's tensors keep their memory. Modules are compared, given rank 0's
values, and watched for changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from unisono.accelerator import forked_generators
from unisono.comm import Communicator
from unisono.comm.collectives import all_reduce_together
from unisono.comm.mpi_style import get_comm
from unisono.errors import CollectiveMismatch, UnisonoError, explain
from unisono.expect import one_line, refusal

RESET_SEED = 2147483646
"""Seed of `reset_parameters`, the one HeAT uses."""


def communicator_of(comm: object) -> Communicator:
    """Return the communicator that `comm` names; None is the world, or what `use_comm` set. Local.

    A `Communicator` is used as it is, so that a subclass keeps its own behaviour. Where a launcher
    started this process as a rank and its world was not joined yet, None joins it (collective).

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
        raise refusal(
            TypeError,
            f"comm={one_line(comm)}",
            f"{type(comm).__name__}, which names no group of ranks",
            hint="None, a Communicator, an MPICommunication or a ProcessGroup",
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
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for x in tensors:
        by_device[x.device].append(x.detach())
    for device, members in by_device.items():
        all_reduce_together(on_device(comm, device), members, "mean", max_mb=math.inf)


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


def check_same_module(module: nn.Module, comm: Communicator, options: Mapping[str, object]) -> None:
    """Raise on all ranks unless they have the same parameters, buffers and options. Collective.

    Args:
        module: this rank's module.
        comm: the ranks that compare.
        options: whatever else must agree; functions by their names.

    Raises:
        CollectiveMismatch: names the first parameter that differs and two ranks.
    """
    descriptions = {
        name: getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
        for name, value in options.items()
    }
    lines = [*_described(module), f"options: {descriptions}"]
    if comm.all_equal("\n".join(lines)):
        return
    lines_by_rank: list[list[str]] = comm.all_gather_object(lines)
    other = next(r for r in range(1, comm.size) if lines_by_rank[r] != lines_by_rank[0])
    both = zip_longest(lines_by_rank[0], lines_by_rank[other], fillvalue="(nothing)")
    ours, theirs = next(pair for pair in both if pair[0] != pair[1])
    name = (ours if theirs == "(nothing)" else theirs).partition(":")[0]
    first, second = comm.ranks[0], comm.ranks[other]
    text = explain(
        f"the same module on {comm.size} ranks",
        f"{name} differs between rank {first} and rank {second}",
        f"rank {first}: {ours}\nrank {second}: {theirs}",
        "build the module and its options from the same code on every rank",
    )
    raise CollectiveMismatch(text, calls={first: ours, second: theirs})


def _described(module: nn.Module) -> list[str]:
    """Return one line for each parameter and buffer with all that must agree between ranks."""
    first_name: dict[int, str] = {}
    lines: list[str] = []
    for name, param in module.named_parameters(remove_duplicate=False):
        same_as = first_name.setdefault(id(param), name)
        frozen = "" if param.requires_grad else ", frozen"
        tied = "" if same_as == name else f", the same as {same_as}"
        lines.append(f"{name}: {_layout(param)}{frozen}{tied}")
    buffers = module.named_buffers()
    return lines + [f"{name}: {_layout(buffer)}, a buffer" for name, buffer in buffers]


def _layout(x: Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} {list(x.shape)}, strides {list(x.stride())}, on {x.device.type}"


def broadcast_module(module: nn.Module, comm: Communicator, src: int = 0) -> None:
    """Give all ranks the parameters and buffers of rank `src`. Collective; no RNG is touched."""
    broadcast_tensors([*module.parameters(), *module.buffers()], comm, src)


def reset_module(module: nn.Module, comm: Communicator) -> None:
    """Re-initialise the parameters on rank 0 with a fixed seed; its RNG state is put back.

    Args:
        module: its submodules are reset one by one.
        comm: only its rank 0 does anything; the others get the values by the broadcast.
    """
    if comm.rank != 0:
        return
    with forked_generators({p.device for p in module.parameters()}):
        torch.manual_seed(RESET_SEED)
        module.apply(reset_layer)


def reset_layer(module: nn.Module) -> None:
    """Call `module.reset_parameters()` if it has one."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def name_as_wrapped(state: dict[str, Any], prefix: str, module: nn.Module) -> None:
    """Put `module.` before the names of a state that was saved without it. Local.

    Args:
        state: of a wrapper, or of the module inside; names are changed in place.
        prefix: what stands before the names of the wrapper.
        module: the module inside. It may have a part that is itself called `module`, so what its
            names are decides, not how those of the state begin.
    """
    inside = f"{prefix}module."
    tensors = (module.named_parameters, module.named_buffers)
    local_names = {name for each in tensors for name, _ in each(remove_duplicate=False)}
    if sum(prefix + name in state for name in local_names) <= sum(
        inside + name in state for name in local_names
    ):
        return
    # Other names stay, and are reported as they are.
    heads = {"_extra_state", *(name.partition(".")[0] for name in local_names), *module._modules}
    bare = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    moved = {name: state.pop(prefix + name) for name in bare if name.partition(".")[0] in heads}
    state.update((inside + name, x) for name, x in moved.items())


def structure_of(module: nn.Module) -> list[tuple[object, ...]]:
    """Return what buckets are made for; other when a parameter was added, frozen or moved."""
    return [
        (id(p), p.requires_grad, p.dtype, p.device, p.shape, p.stride())
        for p in module.parameters()
    ]

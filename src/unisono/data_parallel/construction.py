"""What happens when a module becomes parallel: ranks compare it, and take rank 0's values."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import CollectiveMismatch

RESET_SEED = 2147483646
"""Seed of `reset_parameters`, the one HeAT uses."""


def describe_module(module: nn.Module) -> list[str]:
    """Return one line for each parameter and buffer with all that must agree between ranks."""
    first_name: dict[int, str] = {}
    lines: list[str] = []
    for name, param in module.named_parameters(remove_duplicate=False):
        same_as = first_name.setdefault(id(param), name)
        lines.append(_line(name, param, "" if same_as == name else f", the same as {same_as}"))
    return lines + [_line(name, buffer, ", a buffer") for name, buffer in module.named_buffers()]


def _line(name: str, x: Tensor, more: str) -> str:
    frozen = "" if x.requires_grad or more == ", a buffer" else ", frozen"
    dtype = str(x.dtype).removeprefix("torch.")
    place = f"{dtype} {list(x.shape)}, strides {list(x.stride())}, on {x.device.type}"
    return f"{name}: {place}{frozen}{more}"


def check_same_module(module: nn.Module, comm: Communicator, options: Iterable[object]) -> None:
    """Raise on all ranks unless they have the same parameters, buffers and options. Collective.

    Args:
        module: this rank's module.
        comm: the ranks that compare.
        options: whatever else must agree; compared by `repr`.

    Raises:
        CollectiveMismatch: names the first parameter that differs and two ranks.
    """
    if comm.size == 1:
        return
    lines = [*describe_module(module), f"options: {list(options)!r}"]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    word = int.from_bytes(digest[:8], "little", signed=True)
    words = comm.all_gather_ints([word])
    if len(set(words)) == 1:
        return
    everybody: list[list[str]] = comm.all_gather_object(lines)
    raise _mismatch(everybody, comm.ranks)


def _mismatch(everybody: list[list[str]], ranks: tuple[int, ...]) -> CollectiveMismatch:
    first, other = next((0, r) for r in range(1, len(everybody)) if everybody[r] != everybody[0])
    longest = max(len(everybody[first]), len(everybody[other]))
    nothing = "(nothing)"
    for i in range(longest):
        mine = everybody[first][i] if i < len(everybody[first]) else nothing
        theirs = everybody[other][i] if i < len(everybody[other]) else nothing
        if mine != theirs:
            break
    else:
        mine = theirs = nothing
    name = (mine if theirs == nothing else theirs).partition(":")[0]
    text = CollectiveMismatch.because(
        f"the same module on {len(everybody)} ranks",
        f"{name} differs between rank {ranks[first]} and rank {ranks[other]}",
        f"rank {ranks[first]}: {mine}\nrank {ranks[other]}: {theirs}",
        "build the module and its options from the same code on every rank",
    )
    calls = {ranks[first]: mine, ranks[other]: theirs}
    return CollectiveMismatch(str(text), calls=calls)


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
    own = {name for each in tensors for name, _ in each(remove_duplicate=False)}
    if sum(prefix + name in state for name in own) <= sum(inside + name in state for name in own):
        return
    # Other names stay, and are reported as they are.
    heads = {"_extra_state", *(name.partition(".")[0] for name in own), *module._modules}
    bare = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    moved = {name: state.pop(prefix + name) for name in bare if name.partition(".")[0] in heads}
    state.update((inside + name, x) for name, x in moved.items())


def broadcast_module(module: nn.Module, comm: Communicator, src: int = 0) -> None:
    """Give all ranks the parameters and buffers of rank `src`. Collective; no RNG is touched.

    One message for each device and dtype, whatever the number of tensors.
    """
    broadcast_tensors([*module.parameters(), *module.buffers()], comm, src)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Communicator, src: int = 0) -> None:
    """Overwrite tensors with those of rank `src`: one message for each device and dtype."""
    if comm.size == 1:
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for x in tensors:
        if x.numel():
            kinds[x.device, x.dtype].append(distinct(x.detach()))
    for (device, _), members in kinds.items():
        flat = torch.cat([x.reshape(-1) for x in members])
        on_device(comm, device).broadcast_(flat, src)
        if comm.rank != src:
            for x, part in zip(members, flat.split([x.numel() for x in members]), strict=True):
                x.copy_(part.view(x.shape))


def distinct(x: Tensor) -> Tensor:
    """Return a view of `x` without the repetitions that `expand` makes, so it can be written to."""
    if 0 in x.stride():
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if stride == 0 and size > 1:
                x = x.narrow(dim, 0, 1)
    return x


def on_device(comm: Communicator, device: torch.device) -> Communicator:
    """Return `comm` for tensors on `device`."""
    return comm if comm.device.type == device.type else comm.with_device(device)


def reset_module(module: nn.Module, comm: Communicator) -> None:
    """Re-initialise the parameters on rank 0 with a fixed seed; its RNG state is put back.

    Args:
        module: its submodules are reset one by one.
        comm: only its rank 0 does anything; the others get the values by the broadcast.
    """
    if comm.rank != 0:
        return
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(d.index for d in devices)):
        torch.manual_seed(RESET_SEED)
        module.apply(reset_layer)


def reset_layer(module: nn.Module) -> None:
    """Call `module.reset_parameters()` if it has one."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()

"""The same module on every rank: compared, given rank 0's values, and watched for changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.data_parallel.ranks import broadcast_tensors
from unisono.errors import CollectiveMismatch, explain

RESET_SEED = 2147483646
"""Seed of `reset_parameters`, the one HeAT uses."""


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
    lines = [*_described(module), f"options: {list(options)!r}"]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    number = int.from_bytes(digest[:8], "little", signed=True)
    if len(set(comm.all_gather_ints([number]))) == 1:
        return
    everybody: list[list[str]] = comm.all_gather_object(lines)
    other = next(r for r in range(1, comm.size) if everybody[r] != everybody[0])
    both = zip_longest(everybody[0], everybody[other], fillvalue="(nothing)")
    mine, theirs = next(pair for pair in both if pair[0] != pair[1])
    name = (mine if theirs == "(nothing)" else theirs).partition(":")[0]
    first, second = comm.ranks[0], comm.ranks[other]
    text = explain(
        f"the same module on {comm.size} ranks",
        f"{name} differs between rank {first} and rank {second}",
        f"rank {first}: {mine}\nrank {second}: {theirs}",
        "build the module and its options from the same code on every rank",
    )
    raise CollectiveMismatch(text, calls={first: mine, second: theirs})


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
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(d.index for d in devices)):
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
    own = {name for each in tensors for name, _ in each(remove_duplicate=False)}
    if sum(prefix + name in state for name in own) <= sum(inside + name in state for name in own):
        return
    # Other names stay, and are reported as they are.
    heads = {"_extra_state", *(name.partition(".")[0] for name in own), *module._modules}
    bare = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    moved = {name: state.pop(prefix + name) for name in bare if name.partition(".")[0] in heads}
    state.update((inside + name, x) for name, x in moved.items())


class Structure:
    """The parameters of a module as they were: which objects, trainable or not, dtype, shape.

    Asked at every forward, so it looks into the tables of the modules instead of walking the tree.
    """

    def __init__(self, module: nn.Module) -> None:
        tables = [part._parameters for part in module.modules()]
        children = [part._modules for part in module.modules()]
        self._sizes = [(table, len(table)) for table in (*tables, *children)]
        self._children = [(table, name, x) for table in children for name, x in table.items()]
        self._parameters = [
            (table, name, p, p.requires_grad, p.dtype, p.device, p.shape, p.stride())
            for table in tables
            for name, p in table.items()
            if p is not None
        ]

    def has_changed(self) -> bool:
        """Whether a parameter or module was added, replaced, frozen, moved or reshaped."""
        for table, size in self._sizes:
            if len(table) != size:
                return True
        for table, name, child in self._children:
            if table.get(name) is not child:
                return True
        for table, name, p, trainable, dtype, device, shape, strides in self._parameters:
            if (
                table.get(name) is not p
                or p.requires_grad is not trainable
                or p.dtype is not dtype
                or p.device != device
                or p.shape != shape
                or p.stride() != strides
            ):
                return True
        return False

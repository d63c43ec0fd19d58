"""The state of a module: under the names of the module inside of all wrappers, in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unisono.data_parallel import DataParallel, DataParallelMultiGPU
from unisono.nn import Shard, state_dict_mode
from unisono.train.checkpoint.blocks import empty_like, is_leaf, shape_of
from unisono.train.checkpoint.tree import Path

_COMPILED = "_orig_mod."
"""What torch.compile puts into names."""


class ModulePart:
    """A module: data-parallel, distributed layers, FSDP2, DTensor, or plain."""

    def __init__(self, module: nn.Module) -> None:
        self.module = _inside(module)
        self.kind = type(self.module).__name__
        with state_dict_mode("sharded"):
            state = self.module.state_dict()
        self._own_names = {name.replace(_COMPILED, ""): name for name in state}
        self.state: dict[str, Any] = {name.replace(_COMPILED, ""): state[name] for name in state}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters under the names of the state."""
        return {name.replace(_COMPILED, ""): p for name, p in self.module.named_parameters()}

    def capture(self) -> dict[str, Any]:
        """Return own blocks of all parameters and buffers."""
        return self.state

    def problems(self, rest: Any, shapes: Mapping[Path, tuple[int, ...]]) -> list[str]:
        """Compare names and shapes."""
        saved = dict.fromkeys(rest, "an object") | {p[0]: list(s) for p, s in shapes.items()}
        here = {
            name: list(shape_of(value)) if is_leaf(value) else "an object"
            for name, value in self.state.items()
        }
        return compared(saved, here)

    def place(self, path: Path, shape: tuple[int, ...]) -> tuple[Shard, Any] | None:
        """Return memory for this rank's block."""
        return block_for(self.state.get(path[0]), shape)

    def apply(self, tree: Any, *, same_ranks: bool) -> None:  # noqa: ARG002
        """Load the state."""
        self.module.load_state_dict({self._own_names[name]: v for name, v in tree.items()})


def compared(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Say in what two tables of shapes differ."""
    told = [f"{name}: not in the checkpoint" for name in here if name not in saved]
    told += [f"{name}: only in the checkpoint" for name in saved if name not in here]
    other = [name for name in here if name in saved and saved[name] != here[name]]
    return told + [f"{name}: {saved[name]} in the checkpoint, {here[name]} here" for name in other]


def block_for(like: Any, shape: tuple[int, ...]) -> tuple[Shard, Any] | None:
    """Return memory for a block that lies where `like`, of a whole of this shape, lies."""
    if isinstance(like, Shard | DTensor) and shape_of(like) == tuple(shape):
        return empty_like(like)
    return None


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside of wrappers that only add ways to train it."""
    while True:
        if isinstance(module, DataParallel):
            module.finalize()
        if isinstance(module, DataParallel | DataParallelMultiGPU | DistributedDataParallel):
            module = module.module
        elif isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            module = compiled
        else:
            return module

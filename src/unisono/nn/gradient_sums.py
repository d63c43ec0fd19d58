"""Ordinary modules inside a split network: gradients of their parameters, summed over ranks.

While such a module runs, stand-ins of its parameters, whose gradients meet, take their place; names
and state stay those of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from unisono.comm.torch.private import runs_uncompiled
from unisono.nn.parameters import summed_gradients
from unisono.nn.state import HoldingModule
from unisono.topology import Partition


def sum_gradients(module: nn.Module, partition: Partition, *, deep: bool = True) -> None:
    """Let a module's backward sum the gradients of its parameters over a partition.

    Args:
        module: an ordinary module that each rank runs on points of its own.
        partition: the ranks that hold its parameters.
        deep: parameters of all modules inside too; layers that sum by themselves are left alone.
    """
    hooks = _StandIns(partition, deep)
    if any(True for _ in hooks.held(module)):
        module.register_forward_pre_hook(hooks.begin)
        module.register_forward_hook(hooks.end, always_call=True)


@dataclass(frozen=True)
class _StandIns:
    partition: Partition
    deep: bool

    def held(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yield the parameters, each with its owner and its name there."""
        for owner in module.modules() if self.deep else (module,):
            if not isinstance(owner, HoldingModule):
                for name, p in owner._parameters.items():
                    if p is not None:
                        yield owner, name, p

    @runs_uncompiled
    def begin(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        """Put the stand-ins where attributes are looked up first."""
        if not self.partition.active:
            return
        held = list(self.held(module))
        summed = summed_gradients(self.partition.comm, *(p for _, _, p in held))
        for (owner, name, _), value in zip(held, summed, strict=True):
            owner.__dict__[name] = value
            if isinstance(owner, nn.RNNBase):
                owner._flat_weights[owner._flat_weights_names.index(name)] = value

    @runs_uncompiled
    def end(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """Take them away; called after an error too."""
        for owner, name, p in self.held(module):
            owner.__dict__.pop(name, None)
            if isinstance(owner, nn.RNNBase):
                owner._flat_weights[owner._flat_weights_names.index(name)] = p

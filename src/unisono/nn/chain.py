"""`DistributedSequential`: a chain of split layers that asks once for all of them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from unisono.comm.torch.private import runs_uncompiled
from unisono.errors import PartitionError, UnisonoError, an
from unisono.nn.agreement import INPUTS, NO_GRAD, PARAMETERS, ask, chained
from unisono.nn.joining import Join
from unisono.nn.structure import Structure
from unisono.topology import Partition

__all__ = ["DistributedSequential"]


class DistributedSequential(nn.Sequential):
    """A chain of layers that agrees once for all of them whether an input has changed."""

    def __init__(self, partition: Partition, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._partition = partition
        self._structure: Structure | None = None
        self._join_before: str | None = None
        self._join: tuple[Join, ...] = ()

    def __getitem__(self, idx: slice | int) -> Any:
        """Return a layer, or some of them as a chain that gathers where this one does."""
        if not isinstance(idx, slice):
            return super().__getitem__(idx)
        part = DistributedSequential(self._partition, dict(children_of(self)[idx]))
        if self._join_before in part._modules:
            part._join_before, part._join = self._join_before, self._join
        return part

    def __delitem__(self, idx: slice | int) -> None:
        """Refuse: layers behind would change their names, and the gathering its place."""
        self._refuse_edit()

    def insert(self, index: int, module: nn.Module) -> NoReturn:  # noqa: ARG002
        """Refuse, as `del` does."""
        self._refuse_edit()

    def __add__(self, other: object) -> NoReturn:
        """Refuse: a plain chain of these layers would not gather."""
        self._refuse_edit()

    def __mul__(self, other: object) -> NoReturn:
        """Refuse, as `+` does."""
        self._refuse_edit()

    def _refuse_edit(self) -> NoReturn:
        raise PartitionError.because(
            "a change of a split chain",
            f"{len(self)} layers, whose places are fixed",
            None,
            "change the torch network, then distribute it; nn.Sequential(net, more) adds to it",
        )

    @runs_uncompiled
    def forward(self, input: Tensor) -> Tensor:
        """Run the chain on this rank's block."""
        comm = self._partition.comm if self._partition.active else None
        is_tensor = isinstance(input, Tensor)
        found = Structure.of(input) if is_tensor else None
        question = ask(
            comm if comm is not None and comm.size > 1 else None,
            changed=found != self._structure,
            gradients=self._wanted_gradients(input) if is_tensor else NO_GRAD,
            problem=None if is_tensor else _no_tensor(input),
        )
        known, self._structure = self._structure, None  # and so it stays if the call fails
        if known is None:
            question.answer()  # layers that are not set up do not ask
        x = input
        if found is None and known is not None:  # take part once more before all raise
            x = known.zeros()
        with chained(question):
            for name, layer in children_of(self):
                if name == self._join_before:
                    x = self._join[0](x)
                x = layer(x)
        self._structure = found
        return x

    def _wanted_gradients(self, x: Tensor) -> int:
        if not torch.is_grad_enabled():
            return NO_GRAD
        if x.requires_grad:
            return INPUTS
        return PARAMETERS if any(p.requires_grad for p in self.parameters()) else NO_GRAD


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children with their names; one that stands in two places, twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _no_tensor(found: object) -> UnisonoError:
    return PartitionError.because(
        "forward of a split network", an(type(found).__name__), None, "call it with tensors"
    )

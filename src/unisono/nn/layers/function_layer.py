"""`FunctionLayer`: a layer that is a function of torch: this rank's block in, its block out.

The ranks agree on what they hold; then the block is shown as a `Split`, and the function's rule
for split tensors does the rest. Blocks may be empty, before and after.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from unisono.errors import PartitionError
from unisono.nn.agreement import Cuts, Table
from unisono.nn.planned import PlannedModule
from unisono.nn.split_tensors.blocks import recut
from unisono.nn.split_tensors.dispatch import by_blocks
from unisono.nn.split_tensors.tensor import Cut, Run, Split, made, mapped
from unisono.topology.decompose import split_sizes


@dataclass(frozen=True)
class FunctionPlan:
    """How inputs of known shapes are shown."""

    run: Run
    shape: tuple[int, ...]
    """Of the whole input."""
    cuts: dict[int, Cut]
    balanced: dict[int, tuple[int, ...]]
    """Dims in front of those in space whose blocks are made balanced first, and their sizes."""
    parameters: dict[int, Cut] = field(default_factory=dict[int, Cut])
    """How parameters are cut, by their own dims."""


class FunctionLayer(PlannedModule):
    """A layer whose inputs have the same blocks, and which calls a function of torch."""

    _plan: FunctionPlan

    _balances: ClassVar[bool] = True
    """Whether blocks of the result are balanced in all dims."""

    @property
    def _rule_sums_gradients(self) -> bool:
        """Whether the function's rule sums gradients of parameters, instead of the layer."""
        return False

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raise for a whole input that the function does not take."""

    def _make_plan(self, tables: Sequence[Table]) -> FunctionPlan:
        P = self.P_x
        cuts, dtype = tables[0].cuts(P), tables[0].dtype(P)
        for table in tables[1:]:
            table.dtype(P)
            if table.cuts(P) != cuts:
                raise PartitionError.because(
                    type(self).__name__,
                    f"input of {list(_shape(cuts))}, target of {list(_shape(table.cuts(P)))}",
                    "their blocks differ",
                    "cut the target like the input",
                )
        self._check(_shape(cuts), dtype)
        sizes = {
            dim: tuple(b - a for a, b in itertools.pairwise(bounds))
            for dim, bounds in enumerate(cuts)
            if len(bounds) > 2
        }
        even = {dim: split_sizes(sum(each), len(each)) for dim, each in sizes.items()}
        return FunctionPlan(
            Run(P, None, strict=True, keeps_empty=True, sums_gradients=self._rule_sums_gradients),
            _shape(cuts),
            {dim: Cut(each, P.sub(dim).comm) for dim, each in sizes.items()},
            {d: even[d] for d in even if d < 2 and even[d] != sizes[d]} if self._balances else {},
        )

    def _called(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function with blocks, and return blocks.

        Args:
            function: of torch, with a rule for split tensors.
            args: plain tensors are own blocks, cut like the input.
            options: by name; plain tensors are equal on all ranks.
        """
        plan = self._plan
        result = self._split_result(function, *args, **options)
        plan.run.copies.clear()  # the next call makes its own
        return mapped(_block, result) if plan.cuts else result

    def _split_result(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function as `_called` does, and return what it returns: split tensors."""
        if not self._plan.cuts:
            return function(*args, **options)
        return by_blocks(function, *map(self._shown, args), **options)

    def _shown(self, x: Any) -> Any:
        """Return an own block as a split tensor, if anything is cut; anything else as it is."""
        plan = self._plan
        if type(x) is Split or not isinstance(x, Tensor) or not plan.cuts:
            return x
        split: Any = made(x, plan.shape, plan.cuts, plan.run)
        for dim, sizes in plan.balanced.items():
            split = recut(split, dim, sizes)
        return split


def _shape(cuts: Cuts) -> tuple[int, ...]:
    return tuple(bounds[-1] for bounds in cuts)


def _block(x: Split) -> Tensor:
    return x.local

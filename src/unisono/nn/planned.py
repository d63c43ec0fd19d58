"""`PlannedModule`: a layer whose every message follows from a plan, and plans from shapes alone.

Set-up gathers one table of shapes; `_make_plan` turns it into what this rank does. Plans are frozen
and kept: going back to known shapes costs the table only, and a backward uses the plan of its own
forward whatever was called since.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from unisono.errors import PartitionError, UnisonoError
from unisono.nn.agreement import gather_tables
from unisono.nn.module import Module
from unisono.nn.structure import Structure, Table
from unisono.operators import attach

P = TypeVar("P")
KEPT_PLANS = 8


class PlannedModule(Module, Generic[P]):
    """Base of unisono's own layers.

    A subclass has `_describe` (arguments that must be equal on all ranks), `_make_plan` (pure: the
    same table gives every rank its part of one plan) and `forward`, which carries out `self._plan`
    on inputs that went through `self._tied`.
    """

    _plan: P

    def __init__(self) -> None:
        super().__init__()
        self._structures: tuple[Structure, ...] = ()
        self._plans: OrderedDict[tuple[Table, ...], P] = OrderedDict()
        self._setups = 0
        """How often set-up has run."""

    @abstractmethod
    def _describe(self) -> tuple[object, ...]:
        """Return what must be equal on all ranks of the layer."""

    @abstractmethod
    def _make_plan(self, tables: Sequence[Table]) -> P:
        """Return what this rank does for inputs of these structures."""

    def _problem_of(self, input: tuple[Any, ...]) -> UnisonoError | None:
        wrong = next((x for x in input if not isinstance(x, Tensor)), None)
        if wrong is None and input:
            return None
        found = "nothing" if not input else f"a {type(wrong).__name__}"
        return PartitionError.because(
            f"forward of {type(self).__name__}", found, None, "call it with tensors"
        )

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:
        return _structures(input) != self._structures

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        problem = self._problem_of(input)
        root = self._root()
        members = self._members()
        if root is None or root.rank not in members:
            if problem is not None:
                raise problem
            self._structures = _structures(input)
            return
        tables, self._needs_grad = gather_tables(
            self._agreeing,
            [x for x in input if isinstance(x, Tensor)],
            (type(self).__name__, *self._describe()),
            problem,
            self._wants_grad(input),
            members,
        )
        self._setups += 1
        key = tuple(tables)
        if key not in self._plans:
            self._plans[key] = self._make_plan(tables)
            while len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        self._plan = self._plans[key]
        self._structures = _structures(input)

    @property
    def _takes_part(self) -> bool:
        """Whether this rank is in any of the layer's partitions."""
        root = self._root()
        return root is not None and root.rank in self._members()

    def _tied(self, x: Tensor) -> Tensor:
        """Return `x` as part of the graph wherever some rank needs gradients.

        Then the backward of every rank enters the layer's messages, in the same order.
        """
        if not self._needs_grad or x.requires_grad or not torch.is_grad_enabled():
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x
        return attach(x, torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True))

    def _outside(self, x: Tensor) -> Tensor:
        """Return what a rank that takes no part gets: its input, tied to the graph in grad mode.

        Such a rank cannot know whether the others need gradients; a tie without use costs nothing.
        """
        self._needs_grad = torch.is_grad_enabled()
        return self._tied(x.view_as(x))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the plans behind: they are made anew where the copy is called."""
        state = self.__dict__.copy()
        state.pop("_plan", None)
        state["_plans"] = OrderedDict()
        state["_structures"] = ()
        state["_distdl_is_setup"] = False
        state["_agreeing"] = None
        return state


def _structures(input: tuple[Any, ...]) -> tuple[Structure, ...]:
    return tuple(Structure.of(x) for x in input if isinstance(x, Tensor))


def zero_volume(x: Tensor, *, preserve_batch: bool = True) -> tuple[int, ...]:
    """Return the shape of what a rank outside of the destination gets."""
    return (x.shape[0], 0) if preserve_batch and x.dim() > 0 else (0,)

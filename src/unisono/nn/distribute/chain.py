"""`DistributedSequential`: a chain of split layers that agrees once for all of them.

`Join` is where it goes on with whole samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from unisono.comm.torch.private import runs_uncompiled
from unisono.errors import PartitionError, UnisonoError, an
from unisono.nn.agreement import (
    INPUTS,
    NO_GRAD,
    PARAMETERS,
    Chain,
    Cuts,
    Meetings,
    Structure,
    Table,
    calling,
    current_chain,
)
from unisono.nn.planned import KEPT_PLANS, PlannedModule
from unisono.operators import Repartition
from unisono.operators.gather import concat_replicated, slice_replicated
from unisono.operators.repartition import RepartitionOnGroup
from unisono.topology import Partition
from unisono.topology.decompose import split_cuts
from unisono.topology.overlap import OverlapPlan, overlaps

__all__ = ["DistributedSequential"]


class Join(PlannedModule[tuple[Cuts, OverlapPlan | None]]):
    """Turn blocks into whole samples: all of them on every rank, or each rank its own.

    Args:
        P_x: partition of the input.
        everyone: all ranks of the network; those outside of `P_x` hold the same in other such
            partitions.
        cuts_batch: re-cut by samples instead of gathering on every rank.
    """

    def __init__(self, P_x: Partition, everyone: Partition, *, cuts_batch: bool) -> None:
        super().__init__()
        self.P_x = P_x
        self.everyone = everyone
        self.cuts_batch = cuts_batch

    def _describe(self) -> tuple[object, ...]:
        return (self.P_x.shape, self.everyone, self.cuts_batch)

    def _make_plan(self, tables: Sequence[Table]) -> tuple[Cuts, OverlapPlan | None]:
        (table,) = tables
        table.dtype(self.P_x)
        cuts = table.cuts(self.P_x)
        if not self.cuts_batch or self.P_x.size < self.everyone.size:
            return cuts, None
        samples, *rest = (own[-1] for own in cuts)  # fewer than ranks: some get none
        by_batch = [split_cuts(samples, self.P_x.size), *((0, size) for size in rest)]
        me = self.P_x.root.rank
        return cuts, overlaps(cuts, self.P_x.ranks, by_batch, self.P_x.ranks, me)

    def forward(self, input: Tensor) -> Tensor:
        """Return whole samples."""
        if not self._takes_part:
            return self._outside(input)
        cuts, overlap = self._plan
        tied = self._tied(input)
        if overlap is not None:
            after = overlap.dest_shape or (0,)
            plan = RepartitionOnGroup(self.P_x.root, overlap, tuple(input.shape), after)
            return Repartition.apply(tied, plan)
        y = tied
        for axis in reversed(range(self.P_x.dim)):
            if self.P_x.shape[axis] > 1:
                sizes = [b - a for a, b in pairwise(cuts[axis])]
                y = concat_replicated(y, axis, sizes, comm=self.P_x.sub(axis).comm)
        return slice_replicated(y, 0, comm=self.everyone.comm) if self.cuts_batch else y


class DistributedSequential(nn.Sequential):
    """A chain of layers that agrees once for all of them whether an input has changed."""

    def __init__(self, partition: Partition, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._partition = partition
        self._meetings = Meetings()
        self._calls: OrderedDict[tuple[Table, ...], Chain] = OrderedDict()
        """What the layers did, for each kind of input."""
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
        if current_chain() is not None:  # which has agreed for this one too
            return self._run(input)
        comm = self._partition.comm if self._partition.active else None
        is_tensor = isinstance(input, Tensor)
        agreement = self._meetings.agree(
            comm if comm is not None and comm.size > 1 else None,
            self._partition.ranks,
            (Structure.of(input),) if is_tensor else (),
            self._wanted_gradients(input) if is_tensor else NO_GRAD,
            None if is_tensor else _no_tensor(input),
            lambda: (type(self).__name__, self._partition),
        )
        chain = self._calls.setdefault(agreement.tables, Chain())
        self._calls.move_to_end(agreement.tables)
        while len(self._calls) > KEPT_PLANS:
            self._calls.popitem(last=False)
        chain.gradients = agreement.gradients
        with calling(chain):
            return self._run(input)

    def _run(self, x: Tensor) -> Tensor:
        for name, layer in children_of(self):
            if name == self._join_before:
                x = self._join[0](x)
            x = layer(x)
        return x

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to the ranks of this world."""
        return self.__dict__ | {"_meetings": Meetings(), "_calls": OrderedDict()}

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

"""How dims are cut over ranks, and what the tensors of one forward share."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.topology import Partition
from unisono.topology.decompose import flat_index


@dataclass(frozen=True)
class Cut:
    """How one dim is spread over ranks: `outer` runs, each cut in `sizes` points, one per rank."""

    sizes: tuple[int, ...]
    """Points of each rank of `comm`."""
    comm: Communicator
    """The ranks along this axis of the partition."""
    outer: int = 1
    """Runs of `sum(sizes)` points in the dim; more than 1 after a view that merged dims."""
    joins: tuple[Communicator, ...] = ()
    """Axes of the partition along which `comm` lies, if several; the first changes slowest."""

    @property
    def axes(self) -> tuple[Communicator, ...]:
        """The axes of the partition over which the dim is spread."""
        return self.joins or (self.comm,)

    @property
    def own(self) -> int:
        """Points of this rank in one run."""
        return self.sizes[self.comm.rank]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, since every convolution looks up its plan by its cuts."""
        return hash((self.sizes, self.comm, self.outer, self.joins))

    @cached_property
    def length(self) -> int:
        """Points of the whole dim."""
        return self.outer * sum(self.sizes)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where each rank's points begin in a run, and its end."""
        return (0, *itertools.accumulate(self.sizes))


Grid = tuple[Communicator, tuple[int, ...] | None]
"""Ranks along several axes, and their numbers when the last axis changes fastest; None: as is."""


Cuts = Mapping[int, Cut]
"""Dim of the whole tensor -> how it is cut; other dims are whole on every rank."""


class NoRule(Exception):
    """A rule cannot do this with blocks; the reason goes into the report."""


class NeedsWhole(Exception):
    """A rule can go on once dim `dim` of its first split argument is whole."""

    def __init__(self, dim: int, reason: str) -> None:
        super().__init__(reason)
        self.dim = dim


@dataclass(frozen=True)
class Gathered:
    """Something that had to be gathered in a forward."""

    function: str
    """The torch function."""
    reason: str
    """Why its blocks did not do."""
    shape: tuple[int, ...]
    """Shape of the tensor that was gathered."""
    module: str
    """Path of the module in which it happened."""


SMALLER = "a smaller argument, cut along another dim than the larger"
"""The reason for a gather beside an argument that stays cut; never refused."""


class Run:
    """What the tensors of one forward share.

    Args:
        partition: the ranks, and how the input is cut.
        module: the network, for the paths of its modules.
        strict: refuse instead of gathering.
        attention: how attention over a split sequence is computed.
        keeps_empty: leave ranks without points where there are fewer points than ranks.
        sums_gradients: sum gradients of replicated tensors over the ranks that use them; False for
            parameters of a layer that sums them itself.
    """

    def __init__(
        self,
        partition: Partition,
        module: nn.Module | None,
        strict: bool,
        attention: str = "auto",
        *,
        keeps_empty: bool = False,
        sums_gradients: bool = True,
    ) -> None:
        self.comm = partition.comm
        self.sums_gradients = sums_gradients
        self.keeps_empty = keeps_empty
        self.strict = strict
        self.attention = attention
        self.gathered: Counter[Gathered] = Counter()
        self.copies: dict[tuple[int, frozenset[Communicator]], tuple[int, Tensor]] = {}
        """Copies of replicated leaves for own work, by leaf and axes: one sum per leaf. With the
        version of the leaf, for outside of a network an optimizer may have changed it since."""
        self._partition = partition
        self._grids: dict[tuple[Communicator, ...], Grid] = {}
        self._module = module

    def grid(self, axes: Sequence[Communicator]) -> Grid:
        """Return the ranks along several axes of the partition."""
        if len(axes) == 1:
            return axes[0], None
        cached = self._grids.get(tuple(axes))
        if cached is not None:
            return cached
        whole = self._partition
        dims = {whole.sub(dim).comm: dim for dim, parts in enumerate(whole.shape) if parts > 1}
        if not dims.keys() >= set(axes):
            raise NoRule("tensors that are cut over the ranks of different partitions")
        order = sorted(axes, key=dims.__getitem__)
        ranks: list[int] = []
        for place in itertools.product(*[range(axis.size) for axis in axes]):
            at = dict(zip(axes, place, strict=True))
            ranks.append(flat_index([axis.size for axis in order], [at[axis] for axis in order]))
        comm = whole.sub([dims[axis] for axis in axes]).comm
        is_in_order = ranks == list(range(len(ranks)))
        self._grids[tuple(axes)] = comm, None if is_in_order else tuple(ranks)
        return self._grids[tuple(axes)]

    def ranks_of(self, cuts: Iterable[Cut]) -> Communicator | None:
        """Return all ranks along these cuts, in some order; None without cuts."""
        axes = [axis for cut in cuts for axis in cut.axes]
        return self.grid(axes)[0] if axes else None

    def note(self, function: str, reason: str, x: Tensor) -> None:
        """Write down that `x` has to be gathered, or refuse it."""
        gathered = Gathered(function, reason, tuple(x.shape), self.path())
        if self.strict and reason != SMALLER:
            where = f" in {gathered.module}" if gathered.module else ""
            raise UnisonoError.because(
                f"{function} of a split tensor {list(gathered.shape)}{where}, with strict=True",
                reason,
                None,
                "a rule of your own (unisono.nn.split_rule), or strict=False to gather it",
            )
        self.gathered[gathered] += 1

    def path(self) -> str:
        """Return the path of the innermost module of the network whose forward is running."""
        if self._module is None:
            return ""
        names = {id(module): name for name, module in self._module.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            name = names.get(id(frame.f_locals.get("self")))
            if name:
                return name
            frame = frame.f_back
        return ""


def resized(cut: Cut, sizes: Iterable[int]) -> Cut:
    """Return the cut with other sizes."""
    return replace(cut, sizes=tuple(sizes))

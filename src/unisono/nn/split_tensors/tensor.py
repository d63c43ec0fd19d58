"""`Split`: a tensor of which each rank holds a block, and which torch functions take as whole.

A tensor that is no `Split` is *replicated*: equal on all ranks, counted once. `dispatch` says what
torch functions make of blocks.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from unisono import torch_private as private
from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.operators import slice_replicated
from unisono.topology import Partition
from unisono.topology.decompose import flat_index

# -- how dims are cut ------------------------------------------------------------------------------


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
    """A rule can go on once dim `dim` of a split argument is whole.

    Args:
        dim: the dim.
        reason: why; for the report.
        of: the argument; None: the first one that is cut along the dim.
        also: further dims of it that have to be whole.
    """

    def __init__(
        self, dim: int, reason: str, of: Split | None = None, also: Iterable[int] = ()
    ) -> None:
        super().__init__(reason)
        self.dim, self.of, self.also = dim, of, also


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


SMALLER = "a smaller argument than another one, which is cut otherwise or not at all"
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
        path = ""
        if self._module is not None:
            path, _ = innermost(self._module, [frame for frame, _ in traceback.walk_stack(None)])
        gathered = Gathered(function, reason, tuple(x.shape), path)
        if self.strict and reason != SMALLER:
            where = f" in {gathered.module}" if gathered.module else ""
            raise UnisonoError.because(
                f"{function} of a split tensor {list(gathered.shape)}{where}, with strict=True",
                reason,
                None,
                "a rule of your own (unisono.nn.split_rule), or strict=False to gather it",
            )
        self.gathered[gathered] += 1


def innermost(net: nn.Module, frames: Iterable[FrameType]) -> tuple[str, str]:
    """Return path and class of the module of a network to which the first of some frames belongs.

    `frames` are those that run, or have raised an error, the innermost first.
    """
    names = {id(module): (name, type(module).__name__) for name, module in net.named_modules()}
    own = ("", type(net).__name__)
    places = (names.get(id(frame.f_locals.get("self"))) for frame in frames)
    return next((place for place in places if place and place[0]), own)


def resized(cut: Cut, sizes: Iterable[int]) -> Cut:
    """Return the cut with other sizes."""
    return replace(cut, sizes=tuple(sizes))


# -- memory that one process would share -----------------------------------------------------------


class Memory:
    """The memory of a block; it lives as long as a split tensor in it."""

    __slots__ = ("__weakref__", "_links", "_tensors")

    def __init__(self) -> None:
        self._links: list[weakref.ref[Memory]] = []
        self._tensors: list[weakref.ref[Tensor]] = []

    def add(self, x: Tensor) -> None:
        """Take in a split tensor whose block lies here."""
        self._tensors = [other for other in self._tensors if other() is not None]
        self._tensors.append(weakref.ref(x))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the split tensors that lie here."""
        return (x for other in self._tensors if (x := other()) is not None)

    def link(self, moved: Memory) -> None:
        """Note that torch would not tell `moved` from this memory, nor from those linked to it."""
        self._links = [other for other in self._links if other() is not None]
        for one in (self, *[m for other in self._links if (m := other()) is not None]):
            if one is not moved:
                one._links.append(weakref.ref(moved))
                moved._links.append(weakref.ref(one))

    @property
    def is_linked(self) -> bool:
        """Whether linked memory lives."""
        return any(other() is not None for other in self._links)


def changed_in_place() -> UnisonoError:
    """Return the error for a change that linked memory would not show."""
    return UnisonoError.because(
        "an in-place change of a split tensor or of a view of it",
        "the view had to be moved between ranks, so the other one does not see the change",
        None,
        "the function without the underscore (x = x.mul(2)), or view.clone() first; "
        "x[...] = value for a part of x",
    )


def address(x: Tensor) -> int:
    """Return where a plain tensor lies; empty ones have a place, too."""
    return x.untyped_storage()._cdata


# -- tensors ---------------------------------------------------------------------------------------


# The only way to make a tensor that shows one shape and holds another, and to look below it
# without asking the rules again. Both are what torch's own subclasses use; seen with torch 2.13.
_wrapper_of = Tensor._make_wrapper_subclass
plainly = private.no_subclass


class Calls:
    """What is done with calls that meet a `Split`; other files, which need this one, set it."""

    function: Callable[..., Any]
    """`function(func, args, kwargs)`: a torch function."""
    operator: Callable[..., Any]
    """`operator(op, args, kwargs)`: an operator from below torch's functions."""
    through: Callable[..., Any]
    """Takes a function without a rule apart into its operators."""


CALLS = Calls()


class Split(Tensor):
    """Own block of a tensor that is cut over ranks; shape, dtype and device are those of the whole.

    Made by `unisono.nn.split`, or by `Split.of` and `Split.cut`.
    """

    local: Tensor
    """Own block, a plain tensor with its gradient."""
    cuts: Cuts
    """How each cut dim is spread."""
    run: Run
    """The forward it belongs to."""
    memory: Memory | None
    """Where the block lies, with others; None as long as nothing else shows it."""

    @staticmethod
    def __new__(cls: type[Split], local: Tensor, cuts: Cuts, run: Run) -> Split:  # noqa: D102
        return made(local, whole_shape(local, cuts), dict(sorted(cuts.items())), run)

    def __init__(self, *_: object) -> None:
        super().__init__()

    @staticmethod
    def of(local: Tensor, partition: Partition, *, strict: bool = False) -> Tensor:
        """Return own blocks as a `Split`, outside of a network. Collective over the partition."""
        from unisono.nn.split_tensors.module import entered  # which needs this file

        return entered(local, partition, Run(partition, None, strict))[0]

    @staticmethod
    def cut(whole: Tensor, partition: Partition) -> Tensor:
        """Return the own block of a tensor that all ranks hold equal, as a `Split`. Collective."""
        local = whole
        for dim, parts in enumerate(partition.shape):
            if parts > 1:
                local = slice_replicated(local, dim, comm=partition.sub(dim).comm)
        return Split.of(local.contiguous(), partition)

    def whole(self) -> Tensor:
        """Return the whole tensor, equal on all ranks. Collective; differentiable."""
        from unisono.nn.split_tensors.blocks import joined  # which needs this file

        with plainly():
            return joined(self, self.cuts) if self.cuts else self.local.clone()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        cuts = {dim: list(cut.sizes) for dim, cut in self.cuts.items()}
        if not cuts:
            return f"Split(whole on every rank: {self.local!r})"
        with plainly():
            return f"Split({list(self.shape)}, cut {cuts}, own block {list(self.local.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnisonoError.because(
            "a split tensor to be pickled",
            "it belongs to ranks that are connected now; a file has no ranks",
            None,
            "x.whole() for all of it, x.local for the block of this rank",
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return CALLS.function(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return CALLS.operator(func, args, dict(kwargs) if kwargs else {})


def whole_shape(local: Tensor, cuts: Cuts) -> Sequence[int]:
    """Return the shape of the tensor of which this is the own block."""
    shape = list(local.shape)
    for dim, cut in cuts.items():
        shape[dim] = cut.length
    return shape


def made(
    local: Tensor,
    shape: Sequence[int],
    cuts: Cuts,
    run: Run,
    strides: Sequence[int] | None = None,
) -> Split:
    """Return a block as a `Split`; `cuts` are in order and never changed.

    `strides` are those of the whole in one process, contiguous if not given: ranks read them off it
    alike, whatever their blocks look like.
    """
    # A wrapper that requires grad makes an autograd.Function that takes it record a node, which is
    # how we notice that it has passed by the rules.
    needs_grad = local.requires_grad and torch.is_grad_enabled()
    kind = {"dtype": local.dtype, "device": local.device, "requires_grad": needs_grad}
    self = _wrapper_of(Split, shape, strides, **kind)
    self.local, self.cuts, self.run, self.memory = local, cuts, run, None
    return self


class _Show(torch.autograd.Function):
    """Show a whole tensor as a `Split` without cuts; an autograd.Function may take that."""

    @staticmethod
    def forward(_: Any, whole: Tensor, run: Run, strides: Sequence[int] | None) -> Split:
        """Return the `Split`."""
        return made(whole, whole.shape, {}, run, strides)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Return the gradient of the tensor."""
        return grad, None, None


def without_cuts(whole: Tensor, run: Run) -> Split:
    """Show a tensor that all ranks have as a `Split` without cuts, to operators alone."""
    return made(whole, whole.shape, {}, run, whole.stride())


def moved_view(whole: Tensor, run: Run, strides: Sequence[int] | None) -> Split:
    """Return a view that all ranks have whole, so that changes of it are seen, and refused."""
    view = _Show.apply(whole, run, strides)
    view.local = whole
    return view


def in_run(x: Split, run: Run) -> Split:
    """Return a split tensor as one of another forward."""
    with plainly():
        if not x.cuts:
            return in_memory_of(x, moved_view(x.local, run, x.stride()))
        return in_memory_of(x, made(x.local, x.shape, x.cuts, run, x.stride()))


def memory_of(x: Split) -> Memory:
    """Return the memory of a block, of which something else is known from now on."""
    if x.memory is None:
        x.memory = Memory()
        x.memory.add(x)
    return x.memory


def in_memory_of(base: Split, view: Split) -> Split:
    """Return a split tensor whose block lies in the memory of another one's."""
    view.memory = memory_of(base)
    view.memory.add(view)
    return view


def refuse_change(x: Tensor) -> None:
    """Raise for a change in place that other ranks or views would not see."""
    if isinstance(x, Split) and (not x.cuts or (x.memory is not None and x.memory.is_linked)):
        raise changed_in_place()


def show_gradient(x: Split) -> None:
    """Let split tensors know that their block has got a gradient, by a change in place."""
    for other in (x,) if x.memory is None else x.memory.tensors():
        if other.local.requires_grad and not other.requires_grad:  # type: ignore[attr-defined]
            other.requires_grad_()


def splits_in(values: Any) -> Iterator[Split]:
    """Yield the split tensors in arguments, also inside lists, tuples and dicts."""
    if isinstance(values, Split):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from splits_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from splits_in(value)


def splits_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Split]:
    """Return the split tensors in the arguments of a call."""
    splits: list[Split] = []
    for values in (args, kwargs.values()) if kwargs else (args,):
        for x in values:
            if isinstance(x, Split):
                splits.append(x)
            elif isinstance(x, (list, tuple, dict)):
                splits += splits_in(x)
    return splits


def mapped(change: Callable[[Split], Any], values: Any) -> Any:
    """Return arguments with every split tensor replaced; what holds none stays what it is."""
    if isinstance(values, Split):
        return change(values)
    if next(splits_in(values), None) is None:
        return values
    if isinstance(values, (list, tuple)):
        items = [mapped(change, value) for value in values]
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    if isinstance(values, dict):
        return {key: mapped(change, value) for key, value in values.items()}
    return values


def refuse_passed_by(x: Split) -> None:
    """Raise for a split tensor that an autograd.Function has made: rules make leaves only."""
    with plainly():
        node = x.grad_fn
    if node is None or (not x.cuts and node.name() == f"{_Show.__name__}Backward"):
        return
    raise UnisonoError.because(
        f"a split tensor out of {node.name()}",
        "an autograd.Function, or re-entrant checkpointing, has passed by the rules: its backward "
        "would lose gradients",
        None,
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); for a Function of your own: "
        "x.whole() before it, or a rule: unisono.nn.split_rule(MyFunction, 'pointwise')",
    )


def like(x: Split, local: Tensor, cuts: Cuts | None = None) -> Tensor:
    """Return a block as a `Split` of the same forward; plain if nothing is cut."""
    if cuts is None:
        return made(local, whole_shape(local, x.cuts), x.cuts, x.run)
    if len(cuts) == 1:
        return made(local, whole_shape(local, cuts), cuts, x.run)
    return Split(local, cuts, x.run) if cuts else local


def without_runs(x: Split, dim: int) -> Cut:
    """Return the cut of a dim for a rule that needs points of the dim to follow each other."""
    cut = x.cuts[dim]
    if cut.outer != 1:
        raise NeedsWhole(dim, "the cut lies inside merged dims")
    return cut

"""`Split`: a tensor of which each rank holds a block, and which torch functions take as whole.

Every torch function that meets a `Split` asks the table of rules what to do with the blocks. A
tensor that is no `Split` is *replicated*: equal on all ranks, counted once. What has no rule is
gathered, computed whole, and noted; what would pass by the rules is refused.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unisono import torch_private as private
from unisono.accelerator import generator_state, is_accelerator
from unisono.comm import Communicator
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError
from unisono.nn.agreement import block_digest, cuts_of_blocks, report_equal_blocks
from unisono.nn.split_tensors.memory import Memory, address, changed_in_place
from unisono.nn.split_tensors.preview import (
    UNKNOWN,
    Preview,
    Shown,
    previewed,
    tensors_in,
    with_tensors,
)
from unisono.operators import concat_replicated, copy, move_cut, slice_replicated
from unisono.topology import Partition
from unisono.topology.decompose import flat_index, split_sizes

# The only way to make a tensor that shows one shape and holds another, and to look below it
# without asking the rules again. Both are what torch's own subclasses use; seen with torch 2.13.
_wrapper_of = Tensor._make_wrapper_subclass
_plainly = private.no_subclass

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""Name of a torch function or method -> rule; `name.get` is an attribute."""
_USER_RULES: dict[Callable[..., Any], Rule] = {}
"""Rules of the user's, by function."""


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


class _Aten:
    """The way from a function down to its operators, which is in a file of its own."""

    through: Callable[..., Any]
    on_operator: Callable[..., Any]
    is_on_way: Callable[[], bool]


_ATEN = _Aten()


def set_aten(
    through: Callable[..., Any], on_operator: Callable[..., Any], is_on_way: Callable[[], bool]
) -> None:
    """Say how functions without a rule are taken apart."""
    _ATEN.through, _ATEN.on_operator, _ATEN.is_on_way = through, on_operator, is_on_way


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
        known = self._grids.get(tuple(axes))
        if known is not None:
            return known
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
        found = Gathered(function, reason, tuple(x.shape), self.path())
        if self.strict:
            where = f" in {found.module}" if found.module else ""
            raise UnisonoError.because(
                f"{function} of a split tensor {list(found.shape)}{where}, with strict=True",
                reason,
                None,
                "a rule of your own (unisono.nn.split_rule), or strict=False to gather it",
            )
        self.gathered[found] += 1

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
        return _made(local, _whole_shape(local, cuts), dict(sorted(cuts.items())), run)

    def __init__(self, *_: object) -> None:
        super().__init__()

    @staticmethod
    def of(local: Tensor, partition: Partition, *, strict: bool = False) -> Tensor:
        """Return own blocks as a `Split`, outside of a network. Collective over the partition."""
        return entered(local, partition, Run(partition, None, strict)).tensor

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
        with _plainly():
            return joined(self, self.cuts) if self.cuts else self.local.clone()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        cuts = {dim: list(cut.sizes) for dim, cut in self.cuts.items()}
        if not cuts:
            return f"Split(whole on every rank: {self.local!r})"
        with _plainly():
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
        with _plainly():
            known = _FUNCTIONS.get(func) or _known(func)
            if known.is_query:
                return func(*args, **kwargs) if kwargs else func(*args)
            if known.is_pointwise:
                result = _at_once(func, known, args, kwargs)
                if result is not None:
                    return result
            return _dispatch(func, known, args, dict(kwargs) if kwargs else {})

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _ATEN.is_on_way():
            return _ATEN.on_operator(func, args, dict(kwargs) if kwargs else {})
        raise UnisonoError.because(
            f"{func} of a split tensor",
            "a call from below torch's functions (an autograd.Function, C++ code, vmap), which "
            "knows nothing of blocks",
            None,
            "x.whole() before the call, or unisono.nn.split_rule(fn) for the function around it",
        )


def _whole_shape(local: Tensor, cuts: Cuts) -> Sequence[int]:
    shape = list(local.shape)
    for dim, cut in cuts.items():
        shape[dim] = cut.length
    return shape


def _made(
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
        return _made(whole, whole.shape, {}, run, strides)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Return the gradient of the tensor."""
        return grad, None, None


def without_cuts(whole: Tensor, run: Run) -> Split:
    """Show a tensor that all ranks have as a `Split` without cuts, to operators alone."""
    return _made(whole, whole.shape, {}, run, whole.stride())


def _moved_view(whole: Tensor, run: Run, strides: Sequence[int] | None) -> Split:
    """Return a view that all ranks have whole, so that changes of it are seen, and refused."""
    view = _Show.apply(whole, run, strides)
    view.local = whole
    return view


def in_run(x: Split, run: Run) -> Split:
    """Return a split tensor as one of another forward."""
    with _plainly():
        if not x.cuts:
            return _in_memory_of(x, _moved_view(x.local, run, x.stride()))
        return _in_memory_of(x, _made(x.local, x.shape, x.cuts, run, x.stride()))


def _memory_of(x: Split) -> Memory:
    if x.memory is None:
        x.memory = Memory()
        x.memory.add(x)
    return x.memory


def _in_memory_of(base: Split, view: Split) -> Split:
    """Return a split tensor whose block lies in the memory of another one's."""
    view.memory = _memory_of(base)
    view.memory.add(view)
    return view


def _refuse_change(x: Tensor) -> None:
    if isinstance(x, Split) and (not x.cuts or (x.memory is not None and x.memory.is_linked)):
        raise changed_in_place()


def _show_gradient(x: Split) -> None:
    """Let split tensors know that their block has got a gradient, by a change in place."""
    for other in (x,) if x.memory is None else x.memory.tensors():
        if other.local.requires_grad and not other.requires_grad:  # type: ignore[attr-defined]
            other.requires_grad_()


@dataclass(frozen=True)
class Entry:
    """What ranks have told each other at the entry of a network."""

    tensor: Tensor
    """The own block as a `Split`; as it is if nothing is cut."""
    draws_alike: bool
    """Whether the default generators of all ranks stand alike."""
    alike: bool
    """Whether all ranks have given the same further numbers."""


def _device_state(x: Tensor | None) -> bytes:
    """Return the state of the generator of a tensor's accelerator; nothing on a CPU."""
    if x is None or not is_accelerator(x.device):
        return b""
    return generator_state(x.device).numpy().tobytes()


def entered(x: Tensor | None, partition: Partition, run: Run, numbers: Sequence[int] = ()) -> Entry:
    """Return the own block as a `Split`, and what else ranks agree on.

    The one meeting in which ranks tell each other shapes; all later ones follow by arithmetic.

    Args:
        x: own block; a `Split` stays as it is. None is refused, on all ranks alike.
        partition: how it is cut.
        run: the forward to come.
        numbers: what should be equal on all ranks; 0 is equal to anything.
    """
    comm, known, dims = partition.comm, isinstance(x, Split), partition.dim
    state = zlib.crc32(torch.get_rng_state().numpy().tobytes() + _device_state(x))
    shape, own = [0] * dims, [-1, 0, 0, 0]
    block = 0 if x is None or known else block_digest(x, comm)
    if x is not None:
        with _plainly():
            shape = list(x.shape) if x.ndim == dims and not known else shape
        local = x.local if isinstance(x, Split) else x
        needs = int(local.requires_grad and torch.is_grad_enabled())
        own = [local.ndim, zlib.crc32(str(local.dtype).encode()), needs, int(known)]
    records = comm.all_gather_ints([*shape, *own, state, block, *numbers])
    if len({record[dims : dims + 4] for record in map(tuple, records)}) > 1:
        raise CollectiveMismatch(
            "inputs of a split network: dims, dtype and requires_grad must be equal on all ranks",
            {r: "no tensor" if rec[dims] < 0 else
                f"{rec[dims]} dims, dtype number {rec[dims + 1]}, "
                f"requires_grad {bool(rec[dims + 2])}, split already {bool(rec[dims + 3])}"
             for r, rec in enumerate(records)},
        )  # fmt: skip
    if x is None:
        raise UnisonoError.because(
            "a split network called without a tensor",
            hint="the own block of its input first, then tensors that all ranks hold equal",
        )
    further = zip(*[record[dims + 6 :] for record in records], strict=True)
    draws_alike = len({record[dims + 4] for record in records}) == 1
    alike = all(len(set(column)) == 1 or 0 in column for column in further)
    if isinstance(x, Split):
        return Entry(in_run(x, run), draws_alike, alike)
    if x.ndim != dims:
        raise PartitionError.because(
            f"an input of shape {list(x.shape)} for {partition}",
            arithmetic=f"{x.ndim} dims != {dims}",
            hint=f"Partition({[1] * x.ndim}) with the ranks of the dims that are cut",
        )
    cuts = agreed_cuts([record[:dims] for record in records], partition)
    report_equal_blocks([record[dims + 5] for record in records], x.shape, partition)
    return Entry(Split(x, cuts, run) if cuts else x, draws_alike, alike)


def agreed_cuts(shapes: Sequence[Sequence[int]], partition: Partition) -> dict[int, Cut]:
    """Return the cuts that follow from the blocks of all ranks."""
    cuts: dict[int, Cut] = {}
    for dim, own in enumerate(cuts_of_blocks(shapes, partition)):
        sizes = tuple(b - a for a, b in itertools.pairwise(own))
        if min(sizes) == 0:
            raise PartitionError.because(
                f"blocks of an input over {partition}", f"sizes {list(sizes)} along dim {dim}",
                f"{own[-1]} points for {len(sizes)} ranks", "fewer ranks, or a larger input",
            )  # fmt: skip
        if len(sizes) > 1:
            cuts[dim] = Cut(sizes, partition.sub(dim).comm)
    return cuts


# -- movements of one dim -------------------------------------------------------------------------


def joined(x: Split, dims: Iterable[int]) -> Tensor:
    """Return `x` with these dims whole and replicated; a plain tensor if no cut is left."""
    local, cuts = x.local, dict(x.cuts)
    for dim in list(dims):
        cut = cuts.pop(dim)
        local = unrolled(
            local, dim, cut, lambda t, d, c: concat_replicated(t, d, c.sizes, comm=c.comm)
        )
    return Split(local, cuts, x.run) if cuts else local


def sliced(x: Tensor, dim: int, cut: Cut) -> Tensor:
    """Return the own block along `dim` of a tensor that the ranks of `cut` hold equal."""
    return unrolled(x, dim, cut, lambda t, d, c: slice_replicated(t, d, c.sizes, comm=c.comm))


def unrolled(x: Tensor, dim: int, cut: Cut, move: Callable[[Tensor, int, Cut], Tensor]) -> Tensor:
    """Move along a dim of one run, or of several: then run and point are two dims meanwhile."""
    if cut.outer == 1:
        return move(x, dim, cut)
    apart = move(x.unflatten(dim, (cut.outer, x.shape[dim] // cut.outer)), dim + 1, cut)
    return apart.flatten(dim, dim + 1)


def joined_cuts(x: Split, one: int, other: int) -> Split:
    """Return `x` with one of two cut dims whole: blocks of the other one are cut once more.

    Each rank keeps its share of the points. The dim whose axis changes slowest stays cut, so that
    its blocks follow each other in the order of the ranks.
    """
    is_slow = x.run.grid(x.cuts[one].axes + x.cuts[other].axes)[1] is None
    dim, gone = (one, other) if is_slow else (other, one)
    first, second = x.cuts[dim], x.cuts[gone]
    joins, ranks = first.axes + second.axes, second.comm.size
    comm, order = x.run.grid(joins)
    if order is not None:
        raise NeedsWhole(gone, "two cut dims merged into one, over axes between which one lies")
    if min(first.sizes) < ranks:
        raise NeedsWhole(gone, f"two cut dims merged: {min(first.sizes)} points for {ranks} ranks")
    parts = [split_sizes(n, ranks) for n in first.sizes]
    local = _moved_cut(x, gone, dim, second.sizes, parts[first.comm.rank], second.comm)
    cut = Cut(tuple(n for part in parts for n in part), comm, first.outer, joins)
    rest = {d: c for d, c in x.cuts.items() if d not in (one, other)}
    return Split(local, {**rest, dim: cut}, x.run)


def parted_cut(x: Split, dim: int, other: int, sizes: Sequence[int]) -> Split:
    """Return `x` with the last axis of the cut of `dim` moved to `other`: what undoes a join."""
    cut = x.cuts[dim]
    *left, last = cut.joins
    comm, _ = x.run.grid(left)
    step = last.size
    parts = [cut.sizes[i : i + step] for i in range(0, len(cut.sizes), step)]
    local = _moved_cut(x, dim, other, parts[comm.rank], sizes, last)
    kept = Cut(tuple(map(sum, parts)), comm, cut.outer, tuple(left) if len(left) > 1 else ())
    return Split(local, {**x.cuts, dim: kept, other: Cut(tuple(sizes), last)}, x.run)


def moved(x: Split, source: int, dest: int, sizes: Sequence[int]) -> Split:
    """Return `x` with the cut of one dim moved to another, which is whole."""
    cut = x.cuts[source]
    local = _moved_cut(x, source, dest, cut.sizes, sizes, cut.comm)
    rest = {d: c for d, c in x.cuts.items() if d != source}
    return Split(local, {**rest, dest: replace(cut, sizes=tuple(sizes), outer=1)}, x.run)


def _moved_cut(
    x: Split,
    source: int,
    dest: int,
    source_sizes: Sequence[int],
    dest_sizes: Sequence[int],
    comm: Communicator,
) -> Tensor:
    """Return the own block with the cut along `comm` moved from one dim to another."""
    low, high = sorted((source, dest))
    runs = [x.cuts[d].outer if d in x.cuts else 1 for d in (low, high)]
    local = x.local.unflatten(high, (runs[1], x.local.shape[high] // runs[1]))
    local = local.unflatten(low, (runs[0], x.local.shape[low] // runs[0]))
    places = {low: low + 1, high: high + 2}
    moved = move_cut(local, places[source], places[dest], source_sizes, dest_sizes, comm=comm)
    return moved.flatten(high + 1, high + 2).flatten(low, low + 1)


def own_copy(x: Tensor, cuts: Iterable[Cut], run: Run) -> Tensor:
    """Return a replicated tensor for own work along these cuts: its gradient is summed over them.

    Leaves (parameters) are copied once per forward, so that their gradients are summed once.
    """
    if not x.requires_grad or not torch.is_grad_enabled() or not run.sums_gradients:
        return x
    cuts = tuple(cuts)
    if not cuts:
        return x
    key = id(x), frozenset([axis for cut in cuts for axis in cut.axes])
    version, known = run.copies.get(key, (-1, x))
    if version != x._version or not x.is_leaf:
        known = copy(x, comm=run.grid([axis for cut in cuts for axis in cut.axes])[0])
        if x.is_leaf:
            run.copies[key] = x._version, known
    return known


# -- from a torch function to its rule ------------------------------------------------------------


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of torch functions and methods with these names.

    A rule whose first tensor is said to be a `Split` is not asked where another argument is.
    """

    def register(function: Rule) -> Rule:
        _, first, *_ = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def of_split(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if args and not isinstance(args[0], Split):
                raise NoRule("a replicated tensor first")
            return function(func, *args, **kwargs)

        for name in names:
            RULES[name] = of_split if first.annotation == "Split" else function
        return function

    return register


@dataclass(frozen=True, slots=True)
class _Function:
    """What is known of a torch function."""

    name: str
    how: Rule | None
    changes: bool
    """Whether it changes its first argument."""
    is_query: bool
    """Whether the wrapper answers it."""
    is_pointwise: bool
    """Whether blocks do alone what the whole does, in memory of their own."""
    is_previewed: bool
    """Whether torch is asked first what it does with whole tensors."""


QUERIES: set[str] = set()
"""Functions and attributes that the wrapper, which has the shape of the whole, answers."""
NOT_PREVIEWED: set[str] = set()
"""Functions that ask something of a tensor, or do something with its history."""
_VIEWS = ("T.get", "mT.get", "H.get", "mH.get", "real.get", "imag.get", "data.get")
_OF_MEMORY = """untyped_storage storage _typed_storage data_ptr __dlpack__ set_ resize_ resize_as_
    share_memory_ as_strided_""".split()  # noqa: SIM905
"""Functions of the memory of a tensor, which no rank has."""
_FUNCTIONS: dict[Callable[..., Any], _Function] = {}
"""What was looked up before, so that a call looks up once."""


def _known(func: Callable[..., Any]) -> _Function:
    """Return what is known of a torch function, and keep it."""
    name = _name_of(func)
    room = getattr(func, "__module__", None)
    is_torch = room is None or str(room).startswith("torch")
    how = _USER_RULES.get(func) or RULES.get(name)
    if how is None and is_torch and not name.startswith("__") and is_pointwise_name(name):
        how = RULES["add"]
    is_previewed = is_torch and func not in _USER_RULES and name not in NOT_PREVIEWED
    if name.endswith((".get", ".set")):
        is_previewed = is_previewed and name in _VIEWS
    is_pointwise = how is RULES["add"] and name not in ("detach", "conj", "real", "imag", *_VIEWS)
    known = _Function(name, how, is_inplace(name), name in QUERIES, is_pointwise, is_previewed)
    if len(_FUNCTIONS) < 4096:
        _FUNCTIONS[func] = known
    return known


def is_pointwise_operator(op: Any) -> bool:
    """Whether torch says of an operator that it works point by point."""
    tags = op.tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def is_pointwise_name(name: str) -> bool:
    """Whether all operators of this name work point by point, those with `out=` aside."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return False
    ops = [getattr(packet, of) for of in packet.overloads()]
    ops = [op for op in ops if any("Tensor" in str(a.type) for a in op._schema.arguments)]
    ops = [op for op in ops if not any(a.is_out for a in op._schema.arguments)]
    return bool(ops) and all(is_pointwise_operator(op) and not op.is_view for op in ops)


def set_user_rule(function: Callable[..., Any], how: Rule) -> None:
    """Make `how` the rule of a function, before any other."""
    _USER_RULES[function] = how
    _FUNCTIONS.clear()


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # an attribute: the descriptor knows its name
        return f"{getattr(func, '__self__').__name__}.{name.strip('_')}"  # noqa: B009
    return name


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


def _splits_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Split]:
    """Return the split tensors in the arguments of a call."""
    found: list[Split] = []
    for values in (args, kwargs.values()) if kwargs else (args,):
        for x in values:
            if isinstance(x, Split):
                found.append(x)
            elif isinstance(x, (list, tuple, dict)):
                found += splits_in(x)
    return found


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


def _at_once(
    func: Callable[..., Any],
    known: _Function,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> Any:
    """Return what a pointwise function makes of tensors that are cut alike, and of what is not cut.

    The short way of the rule in `blocks`; None where that has to look closer.
    """
    first = args[0] if args else None
    if type(first) is not Split or first.grad_fn is not None or not first.cuts:
        return None
    if not first.is_contiguous() or (first.memory is not None and first.memory.is_linked):
        return None
    cuts, ndim, changes = first.cuts, first.ndim, known.changes
    blocks = [first.local]
    for x in args[1:]:
        if type(x) is Split:
            if x.ndim != ndim or x.grad_fn is not None or (x.cuts is not cuts and x.cuts != cuts):
                return None
            if not x.is_contiguous():
                return None
            blocks.append(x.local)
        elif isinstance(x, Tensor):  # replicated: broadcast along the cuts, or cut by the rule
            apart = x.ndim - ndim
            if apart > 0 or any(d + apart >= 0 and x.shape[d + apart] != 1 for d in cuts):
                return None
            blocks.append(own_copy(x, cuts.values(), first.run))
        elif isinstance(x, (list, tuple, dict)):
            return None
        else:
            blocks.append(x)
    if kwargs:
        for key, x in kwargs.items():
            if isinstance(x, (Tensor, list, tuple, dict)):
                return None
            changes = changes or (key == "inplace" and x is True)
    result = func(*blocks, **kwargs) if kwargs else func(*blocks)
    local = first.local
    if changes or result is local:
        if local.requires_grad and not first.requires_grad:
            _show_gradient(first)
        return first
    if not isinstance(result, Tensor):
        return None
    shape = first.shape if result.shape == local.shape else _whole_shape(result, cuts)
    return _made(result, shape, cuts, first.run)


def _dispatch(
    func: Callable[..., Any], known: _Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = known.name
    if known.is_previewed:
        seen, tensors = previewed(func, args, kwargs)
    else:
        seen, tensors = UNKNOWN, list(tensors_in((args, kwargs)))
    is_cut = False
    for x in tensors:
        if isinstance(x, Split):
            is_cut = is_cut or bool(x.cuts)
            refuse_passed_by(x)
    changed = [tensors[i] for i in seen.changes]
    if seen is UNKNOWN and (known.changes or kwargs.get("inplace") is True):
        changed = tensors[:1]
    for x in changed:
        _refuse_change(x)
    is_first = not changed or (len(changed) == 1 and changed[0] is (args or (None,))[0])
    ways: list[Callable[[], Any]] = []
    if is_cut and is_first and kwargs.get("out") is None:
        if known.how is not None:
            ways.append(functools.partial(by_rule, known.how, func, name, args, kwargs))
        if known.is_previewed and name not in _OF_MEMORY:
            is_seen = seen.results is not None
            ways.append(
                functools.partial(_ATEN.through, func, name, args, kwargs, changed, is_seen)
            )
    reason = "no rule"
    for way in ways:
        try:
            result = _settled(way(), seen, tensors)
            break
        except NoRule as no:
            reason = str(no)
    else:
        result = gather_all(func, name, reason, args, kwargs, changed)
    for x in changed:
        if isinstance(x, Split):
            _show_gradient(x)
    return result


def by_rule(
    how: Rule, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what the rule of a function makes of its arguments."""
    args, kwargs = along_same_axes(name, args, kwargs)
    while True:
        try:
            return how(func, *args, **kwargs)
        except NeedsWhole as need:
            args, kwargs = _first_whole(name, need, args, kwargs)
            if next(splits_in((args, kwargs)), None) is None:
                return func(*args, **kwargs)
        except TypeError as error:
            if _binds(how, func, args, kwargs):
                raise
            raise NoRule("arguments of an unusual form") from error


def along_same_axes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments whose cuts join the same axes of ranks; plain ones where nothing is cut."""
    found = _splits_of(args, kwargs)
    if not all(x.cuts for x in found):
        args, kwargs = mapped(lambda x: x if x.cuts else x.local, (args, kwargs))
        found = _splits_of(args, kwargs)
    if len(found) > 1 and any(cut.joins for x in found for cut in x.cuts.values()):
        args, kwargs = mapped(lambda x: _along_axes_of(found[0], x, name), (args, kwargs))
    return args, kwargs


def _settled(result: Any, seen: Preview, tensors: Sequence[Tensor]) -> Any:
    """Return results as torch would: themselves arguments, in the memory of some, or in their own.

    Raises:
        NoRule: another shape or dtype than torch's.
    """
    if seen.results is None:
        return result
    found = [result] if isinstance(result, Tensor) else list(tensors_in(result))
    if len(found) != len(seen.results):
        raise NoRule("another number of results")
    for y, shown in zip(found, seen.results, strict=True):
        if y.shape != shown.shape or shown.dtype not in (y.dtype, None):
            raise NoRule("another shape or dtype")
    done = [_shown(y, shown, tensors) for y, shown in zip(found, seen.results, strict=True)]
    if isinstance(result, Tensor):
        return done[0]
    rest = iter(done)
    return with_tensors(result, lambda _: next(rest))


def _shown(y: Tensor, shown: Shown, tensors: Sequence[Tensor]) -> Tensor:
    """Return a result in the memory of the argument that it shows, linked to it, or in its own."""
    if shown.same >= 0:
        return tensors[shown.same]
    block = _block_of(y)
    place = address(block)
    base = next((x for i in shown.shows if isinstance(x := tensors[i], Split)), None)
    if base is None:
        if not shown.shows and any(address(_block_of(x)) == place for x in tensors):
            block = block.clone()
        elif shown.is_contiguous:
            return y
        if not isinstance(y, Split):
            return block
    run, cuts = (base.run, {}) if base is not None and not isinstance(y, Split) else (y.run, y.cuts)  # type: ignore[attr-defined]
    view: Any = y
    if not shown.is_contiguous or block is not vars(y).get("local") or any(y is x for x in tensors):
        strides = None if shown.is_contiguous else shown.stride
        if cuts:
            view = _made(block, shown.shape, cuts, run, strides)
        else:
            view = _moved_view(block, run, strides)
    if base is None:
        return view
    if address(base.local) == place:
        return _in_memory_of(base, view)
    _memory_of(base).link(_memory_of(view))
    return view


def _block_of(x: Tensor) -> Tensor:
    return x.local if isinstance(x, Split) else x


def _along_axes_of(lead: Split, x: Tensor, name: str) -> Tensor:
    """Return `x` with cuts that join the same axes of ranks as those of `lead`, or whole there."""
    groups = {axis: cut.axes for cut in lead.cuts.values() for axis in cut.axes}
    places = {cut.axes[-1]: (dim - lead.ndim, cut) for dim, cut in lead.cuts.items()}
    while isinstance(x, Split):
        unlike = [
            (dim, cut, groups[axis])
            for dim, cut in x.cuts.items()
            for axis in cut.axes
            if groups.get(axis, cut.axes) != cut.axes
        ]
        if not unlike:
            break
        dim, cut, group = unlike[0]
        rest = [d for d, c in x.cuts.items() if d != dim and set(c.axes) <= set(group)]
        place, like_this = places.get(cut.axes[-1], (0, cut))
        to = x.ndim + place
        try:
            if rest and set(cut.axes) <= set(group):
                x = joined_cuts(x, dim, rest[0])
                continue
            fits = cut.joins and 0 <= to < x.ndim and to not in x.cuts and like_this.outer == 1
            if fits and x.shape[to] == like_this.length:
                x = parted_cut(x, dim, to, like_this.sizes)
                continue
        except NeedsWhole:
            pass
        x.run.note(name, "arguments cut in different ways", x)
        x = joined(x, [dim])
    return x


def call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a torch function inside of a rule, by its own rule if an argument is split."""
    if not _splits_of(args, kwargs):
        return func(*args, **kwargs)
    return _dispatch(func, _FUNCTIONS.get(func) or _known(func), args, kwargs)


def by_blocks(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a torch function by its rule: for callers that have checked what torch would check."""
    with _plainly():
        known = _FUNCTIONS.get(func) or _known(func)
        if known.how is None:
            raise NoRule(known.name)
        try:
            return known.how(func, *args, **kwargs)
        except NeedsWhole:
            return by_rule(known.how, func, known.name, args, kwargs)


def refuse_passed_by(x: Split) -> None:
    """Raise for a split tensor that an autograd.Function has made: rules make leaves only."""
    with _plainly():
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


def _binds(how: Rule, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(how).bind(func, *args, **kwargs)
    except TypeError:
        return False
    return True


def _first_whole(
    name: str, need: NeedsWhole, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather one dim of the first split argument that is cut there."""
    first = next(x for x in splits_in((args, kwargs)) if need.dim in x.cuts)
    if is_inplace(name):
        raise NoRule(str(need))
    first.run.note(name, str(need), first)
    whole = joined(first, [need.dim])
    args, kwargs = mapped(lambda x: whole if x is first else x, (args, kwargs))
    return args, kwargs


def is_inplace(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def gather_all(
    func: Callable[..., Any],
    name: str,
    reason: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: Sequence[Tensor],
) -> Any:
    """Compute with whole tensors; what is changed in place is cut again.

    Arguments that are `changed`, and results in the memory of others, are known by their memory.
    """
    _refuse_memory(name, args, kwargs)
    found = {id(x): x for x in splits_in((args, kwargs))}
    for x in found.values():
        if x.cuts:
            x.run.note(name, reason, x)
    wholes = {key: joined(x, x.cuts) for key, x in found.items()}
    if name.startswith("embedding"):
        wholes = {key: _DenseGradient.apply(whole) for key, whole in wholes.items()}
    for x in changed:
        if isinstance(x, Split):
            wholes[id(x)] = wholes[id(x)].clone()
    versions = {key: _version(whole) for key, whole in wholes.items()}
    result = func(*mapped(lambda x: wholes[id(x)], args), **mapped(lambda x: wholes[id(x)], kwargs))
    for key, x in found.items():
        whole = wholes[key]
        if _version(whole) == versions[key] and not any(x is other for other in changed):
            continue
        _refuse_change(x)
        if whole.shape != x.shape:
            raise UnisonoError.because(
                f"{name} of a split tensor {list(x.shape)}",
                f"a change of its shape, to {list(whole.shape)}, in place",
                None,
                f"x = x.{name.rstrip('_')}(...)",
            )
        block = whole
        for dim, cut in x.cuts.items():
            block = sliced(block, dim, cut)
        if block is not x.local:
            x.local.copy_(block)  # in place, so that blocks that are views of each other agree
    places = {address(whole): found[key] for key, whole in wholes.items()}

    def known(y: Tensor) -> Tensor:
        for key, whole in wholes.items():
            if y is whole:
                return found[key]
        x = places.get(address(y)) if y.layout is torch.strided else None
        if x is None:
            return y
        view = _moved_view(y, x.run, y.stride())
        if address(y) == address(x.local):
            return _in_memory_of(x, view)
        _memory_of(x).link(_memory_of(view))
        return view

    if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
        result.setflags(write=False)  # nobody would see the change
    return with_tensors(result, known)


class _DenseGradient(torch.autograd.Function):
    """Take the gradient of a table (`sparse=True`) in a form of which ranks take their part."""

    @staticmethod
    def forward(_: Any, table: Tensor) -> Tensor:
        """Return a copy."""
        return table.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient, with all its zeros."""
        return grad if grad.layout is torch.strided else grad.to_dense()


def _refuse_memory(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for what would be written into memory, or read off it, that no rank has."""
    is_attribute, what = name.endswith(".set"), name.removesuffix(".set")
    if is_attribute or next(splits_in(kwargs.get("out")), None) is not None:
        raise UnisonoError.because(
            f"x.{what} = ... of a split tensor"
            if is_attribute
            else f"{name}(..., out=a split tensor)",
            "its blocks cannot be written from here",
            None,
            "a new tensor: x = ..." if is_attribute else f"x = {name}(...)",
        )
    is_strided = name == "as_strided" and not args[0].is_contiguous()
    if name in _OF_MEMORY or is_strided:
        raise UnisonoError.because(
            f"{name} of a split tensor",
            "each rank has the memory of its own block, which is laid out in another way",
            None,
            "x.local for the own block, x.whole() for a tensor of its own",
        )


def _version(x: Tensor) -> int:
    """Return how often a tensor was changed in place; tensors of inference mode do not count it."""
    return 0 if x.is_inference() else x._version


def shown(local: Tensor, shape: Sequence[int], cuts: Cuts, run: Run) -> Split:
    """Return a block as a `Split` of a known shape; `cuts` are in order and never changed."""
    return _made(local, shape, cuts, run)


def like(x: Split, local: Tensor, cuts: Cuts | None = None) -> Tensor:
    """Return a block as a `Split` of the same forward; plain if nothing is cut."""
    if cuts is None:
        return _made(local, _whole_shape(local, x.cuts), x.cuts, x.run)
    if len(cuts) == 1:
        return _made(local, _whole_shape(local, cuts), cuts, x.run)
    return Split(local, cuts, x.run) if cuts else local


def without_runs(x: Split, dim: int) -> Cut:
    """Return the cut of a dim for a rule that needs points of the dim to follow each other."""
    cut = x.cuts[dim]
    if cut.outer != 1:
        raise NeedsWhole(dim, "the cut lies inside merged dims")
    return cut


def resized(cut: Cut, sizes: Iterable[int]) -> Cut:
    """Return the cut with other sizes."""
    return replace(cut, sizes=tuple(sizes))

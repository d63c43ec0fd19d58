"""`Split`: a tensor of which each rank holds a block, and which torch functions take as whole.

A tensor that is no `Split` is *replicated*: equal on all ranks, counted once. `dispatch` says what
torch functions make of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.errors import UnisonoError
from unisono.nn.split_tensors.cuts import Cut, Cuts, NeedsWhole, Run
from unisono.nn.split_tensors.memory import Memory, changed_in_place
from unisono.operators import slice_replicated
from unisono.topology import Partition

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
        from unisono.nn.split_tensors.entry import entered  # which needs this file

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

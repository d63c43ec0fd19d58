"""From a torch function to its rule, or to the whole.

Every torch function that meets a `Split` asks the table of rules what to do with the blocks. What
has no rule is gathered, computed whole, and noted; what would pass by the rules is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnisonoError
from unisono.nn.split_tensors.blocks import joined, joined_cuts, moved, own_copy, parted_cut, sliced
from unisono.nn.split_tensors.rules import (
    FUNCTIONS,
    OF_MEMORY,
    UNKNOWN,
    Function,
    Preview,
    Rule,
    Shown,
    is_inplace,
    known_function,
    previewed,
    tensors_in,
    with_tensors,
)
from unisono.nn.split_tensors.tensor import (
    CALLS,
    SMALLER,
    NeedsWhole,
    NoRule,
    Split,
    address,
    in_memory_of,
    made,
    mapped,
    memory_of,
    moved_view,
    plainly,
    refuse_change,
    refuse_passed_by,
    show_gradient,
    splits_in,
    splits_of,
    whole_shape,
)
from unisono.topology.decompose import split_sizes


def _on_function(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Any:
    with plainly():
        function = FUNCTIONS.get(func) or known_function(func)
        if function.is_query:
            return func(*args, **kwargs) if kwargs else func(*args)
        if function.is_pointwise:
            result = _at_once(func, function, args, kwargs)
            if result is not None:
                return result
        return _dispatch(func, function, args, dict(kwargs) if kwargs else {})


CALLS.function = _on_function


def _at_once(
    func: Callable[..., Any],
    function: Function,
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
    cuts, ndim, changes = first.cuts, first.ndim, function.changes
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
            show_gradient(first)
        return first
    if not isinstance(result, Tensor):
        return None
    shape = first.shape if result.shape == local.shape else whole_shape(result, cuts)
    return made(result, shape, cuts, first.run)


def _dispatch(
    func: Callable[..., Any], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = function.name
    if function.is_previewed:
        preview, tensors = previewed(func, args, kwargs)
    else:
        preview, tensors = UNKNOWN, list(tensors_in((args, kwargs)))
    is_cut = False
    for x in tensors:
        if isinstance(x, Split):
            is_cut = is_cut or bool(x.cuts)
            refuse_passed_by(x)
    changed = [tensors[i] for i in preview.changes]
    if preview is UNKNOWN and (function.changes or kwargs.get("inplace") is True):
        changed = tensors[:1]
    for x in changed:
        refuse_change(x)
    # Running statistics are changed by the rule itself.
    is_first = (
        not changed
        or name == "instance_norm"
        or (len(changed) == 1 and changed[0] is (args or (None,))[0])
    )
    ways: list[Callable[[], Any]] = []
    if is_cut and is_first and kwargs.get("out") is None:
        if function.how is not None:
            ways.append(functools.partial(by_rule, function.how, func, name, args, kwargs))
        if function.is_previewed and name not in OF_MEMORY:
            is_seen = preview.results is not None
            ways.append(
                functools.partial(CALLS.through, func, name, args, kwargs, changed, is_seen)
            )
    reason = "no rule"
    for way in ways:
        try:
            result = _settled(way(), preview, tensors)
            break
        except NoRule as no:
            reason = str(no)
    else:
        result = gather_all(func, name, reason, args, kwargs, changed)
    for x in changed:
        if isinstance(x, Split):
            show_gradient(x)
    return result


def by_rule(
    how: Rule,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    may_gather: bool = True,
) -> Any:
    """Return what the rule of a function makes of its arguments; move cuts that are in its way.

    Raises:
        NoRule: it does not take them, or something would have to be gathered that must not be.
    """
    args, kwargs = along_same_axes(name, args, kwargs)
    needed = set[int]()
    while True:
        try:
            return applied(how, func, args, kwargs)
        except NeedsWhole as need:
            if is_inplace(name):
                raise NoRule(str(need)) from need
            needed.update([need.dim, *need.also])
            args, kwargs = _with_whole(name, need, needed, args, kwargs, may_gather)
            if next(splits_in((args, kwargs)), None) is None:
                return func(*args, **kwargs)


def applied(
    how: Rule, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what a rule makes of its arguments.

    Raises:
        NoRule: it does not take them.
        NeedsWhole: it would take them with a dim whole.
    """
    try:
        return how(func, *args, **kwargs)
    except TypeError as error:
        if _binds(how, func, args, kwargs):
            raise
        raise NoRule("arguments of an unusual form") from error


def along_same_axes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments whose cuts join the same axes of ranks; plain ones where nothing is cut."""
    splits = splits_of(args, kwargs)
    if not all(x.cuts for x in splits):
        args, kwargs = mapped(lambda x: x if x.cuts else x.local, (args, kwargs))
        splits = splits_of(args, kwargs)
    if len(splits) > 1 and any(cut.joins for x in splits for cut in x.cuts.values()):
        args, kwargs = mapped(lambda x: _along_axes_of(splits[0], x, name), (args, kwargs))
    return args, kwargs


def _settled(result: Any, preview: Preview, tensors: Sequence[Tensor]) -> Any:
    """Return results as torch would: themselves arguments, in the memory of some, or in their own.

    Raises:
        NoRule: another shape or dtype than torch's.
    """
    if preview.results is None:
        return result
    results = [result] if isinstance(result, Tensor) else list(tensors_in(result))
    if len(results) != len(preview.results):
        raise NoRule("another number of results")
    for y, shown in zip(results, preview.results, strict=True):
        if y.shape != shown.shape or shown.dtype not in (y.dtype, None):
            raise NoRule("another shape or dtype")
    done = [_shown(y, shown, tensors) for y, shown in zip(results, preview.results, strict=True)]
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
            view = made(block, shown.shape, cuts, run, strides)
        else:
            view = moved_view(block, run, strides)
    if base is None:
        return view
    if address(base.local) == place:
        return in_memory_of(base, view)
    memory_of(base).link(memory_of(view))
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
    if not splits_of(args, kwargs):
        return func(*args, **kwargs)
    return _dispatch(func, FUNCTIONS.get(func) or known_function(func), args, kwargs)


def by_blocks(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a torch function by its rule: for callers that have checked what torch would check."""
    with plainly():
        function = FUNCTIONS.get(func) or known_function(func)
        if function.how is None:
            raise NoRule(function.name)
        try:
            return function.how(func, *args, **kwargs)
        except NeedsWhole:
            return by_rule(function.how, func, function.name, args, kwargs)


def _binds(how: Rule, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(how).bind(func, *args, **kwargs)
    except TypeError:
        return False
    return True


def _with_whole(
    name: str,
    need: NeedsWhole,
    needed: set[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    may_gather: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments, one that is cut along a dim with that dim whole.

    Another dim is cut instead, unless the rule has `needed` it whole, too; else it is gathered.
    Layers, which keep empty blocks, return what is cut like their input.
    """
    x = need.of
    if x is None:
        x = next((x for x in splits_in((args, kwargs)) if need.dim in x.cuts), None)
    if x is None:  # one that the rule has cut itself
        raise NoRule(str(need))
    ranks = x.cuts[need.dim].comm.size
    others = [d for d, n in enumerate(x.shape) if d not in {*x.cuts, *needed} and n >= ranks]
    if others and not x.run.keeps_empty:
        to = min(others, key=lambda d: x.shape[d] % ranks != 0)
        whole: Tensor = moved(x, need.dim, to, split_sizes(x.shape[to], ranks))
    elif may_gather or is_smaller(x, (args, kwargs)):
        x.run.note(name, SMALLER if is_smaller(x, (args, kwargs)) else str(need), x)
        whole = joined(x, [need.dim])
    else:
        raise NoRule(str(need))
    return mapped(lambda y: whole if y is x else y, (args, kwargs))


def is_smaller(x: Split, values: Any) -> bool:
    """Whether all ranks have a tensor as large whole: then this one may be whole, too."""
    return any(
        y.nbytes >= x.nbytes for y in tensors_in(values) if not (isinstance(y, Split) and y.cuts)
    )


# -- what has no rule -----------------------------------------------------------------------------


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
    splits = {id(x): x for x in splits_in((args, kwargs))}
    for x in splits.values():
        if x.cuts:
            x.run.note(name, SMALLER if is_smaller(x, (args, kwargs)) else reason, x)
    wholes = {key: joined(x, x.cuts) for key, x in splits.items()}
    if name.startswith("embedding"):
        wholes = {key: _DenseGradient.apply(whole) for key, whole in wholes.items()}
    for x in changed:
        if isinstance(x, Split):
            wholes[id(x)] = wholes[id(x)].clone()
    versions = {key: _version(whole) for key, whole in wholes.items()}
    result = func(*mapped(lambda x: wholes[id(x)], args), **mapped(lambda x: wholes[id(x)], kwargs))
    for key, x in splits.items():
        whole = wholes[key]
        if _version(whole) == versions[key] and not any(x is other for other in changed):
            continue
        refuse_change(x)
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
    places = {address(whole): splits[key] for key, whole in wholes.items()}

    def shown(y: Tensor) -> Tensor:
        for key, whole in wholes.items():
            if y is whole:
                return splits[key]
        x = places.get(address(y)) if y.layout is torch.strided else None
        if x is None:
            return y
        view = moved_view(y, x.run, y.stride())
        if address(y) == address(x.local):
            return in_memory_of(x, view)
        memory_of(x).link(memory_of(view))
        return view

    if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
        result.setflags(write=False)  # no rank would see the change
    return with_tensors(result, shown)


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
    if name in OF_MEMORY or is_strided:
        raise UnisonoError.because(
            f"{name} of a split tensor",
            "each rank has the memory of its own block, which is laid out in another way",
            None,
            "x.local for the own block, x.whole() for a tensor of its own",
        )


def _version(x: Tensor) -> int:
    """Return how often a tensor was changed in place; tensors of inference mode do not count it."""
    return 0 if x.is_inference() else x._version

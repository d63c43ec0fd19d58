"""The table of rules, and what is known of a torch function before it is called."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.nn.split_tensors.tensor import NoRule, Split, address

Rule = Callable[..., Any]


RULES: dict[str, Rule] = {}
"""Name of a torch function or method -> rule; `name.get` is an attribute."""


USER_RULES: dict[Callable[..., Any], Rule] = {}
"""Rules of the user's, by function."""


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
class Function:
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


OF_MEMORY = """untyped_storage storage _typed_storage data_ptr __dlpack__ set_ resize_ resize_as_
    share_memory_ as_strided_""".split()  # noqa: SIM905
"""Functions of the memory of a tensor, which no rank has."""


FUNCTIONS: dict[Callable[..., Any], Function] = {}
"""What was looked up before, so that a call looks up once."""


def known_function(func: Callable[..., Any]) -> Function:
    """Return what is known of a torch function, and keep it."""
    name = _name_of(func)
    room = getattr(func, "__module__", None)
    is_torch = room is None or str(room).startswith("torch")
    how = USER_RULES.get(func) or RULES.get(name)
    if how is None and is_torch and not name.startswith("__") and is_pointwise_name(name):
        how = RULES["add"]
    is_previewed = is_torch and func not in USER_RULES and name not in NOT_PREVIEWED
    if name.endswith((".get", ".set")):
        is_previewed = is_previewed and name in _VIEWS
    is_pointwise = how is RULES["add"] and name not in ("detach", "conj", "real", "imag", *_VIEWS)
    known = Function(name, how, is_inplace(name), name in QUERIES, is_pointwise, is_previewed)
    if len(FUNCTIONS) < 4096:
        FUNCTIONS[func] = known
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
    USER_RULES[function] = how
    FUNCTIONS.clear()


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # an attribute: the descriptor knows its name
        return f"{getattr(func, '__self__').__name__}.{name.strip('_')}"  # noqa: B009
    return name


def is_inplace(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


# -- what torch does with whole tensors ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """One tensor of the result."""

    shape: torch.Size
    dtype: torch.dtype | None
    """None under autocast, which leaves tensors without data alone."""
    stride: tuple[int, ...]
    is_contiguous: bool
    same: int
    """Number of the argument that it is; -1 for none."""
    shows: tuple[int, ...]
    """Numbers of the arguments in whose memory it lies."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What a call does; tensors among the arguments are numbered in their order."""

    results: tuple[Shown, ...] | None
    """None where data decides, or torch has no kernel for tensors without data."""
    changes: tuple[int, ...] = ()
    """Numbers of the arguments that are changed in place."""


UNKNOWN = Preview(None)
_PREVIEWS: dict[Any, Preview] = {}
_MOST = 8192
_MOST_POINTS = 1 << 22
"""Points up to which torch's own kernels say why they refuse tensors."""
_UNCHECKED = ("scaled_dot_product_attention", "lu_unpack")
"""Functions whose kernels read beyond tensors that do not fit."""


def previewed(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Preview, list[Tensor]]:
    """Return what a function does with whole arguments, and the tensors among them.

    Raises:
        Exception: what torch raises for them.
    """
    tensors: list[Tensor] = []
    try:
        call = described(args, tensors), described(kwargs, tensors) if kwargs else None
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, nested, not initialised
        return UNKNOWN, list(tensors_in((args, kwargs)))
    has_autocast = private.is_autocast_enabled()
    key = func, call, torch.get_default_dtype(), has_autocast
    try:
        preview = _PREVIEWS.get(key)
    except TypeError:  # an argument without a hash
        return _seen(func, args, kwargs, tensors, has_autocast), tensors
    if preview is None:
        preview = _seen(func, args, kwargs, tensors, has_autocast)
        if len(_PREVIEWS) >= _MOST:
            _PREVIEWS.clear()
        _PREVIEWS[key] = preview
    return preview, tensors


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, also inside lists, tuples, dicts and slices."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, slice):
        yield from tensors_in((values.start, values.stop, values.step))


def with_tensors(values: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return arguments or results with every tensor replaced."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, (list, tuple)):
        items = [with_tensors(value, change) for value in values]
        if isinstance(values, torch.Size):
            return values
        if type(values) in (list, tuple):
            return type(values)(items)
        return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    if isinstance(values, dict):
        return {key: with_tensors(value, change) for key, value in values.items()}
    if isinstance(values, slice):
        return slice(*with_tensors((values.start, values.stop, values.step), change))
    return values


def described(value: Any, tensors: list[Tensor]) -> Any:
    """Return a key for an argument: all that a kernel without data reads of it."""
    if isinstance(value, Tensor):
        for i, other in enumerate(tensors):
            if other is value:
                return i
        if value.layout is not torch.strided:
            raise ValueError("no strides")
        tensors.append(value)
        block = vars(value).get("local", value)
        return value.shape, value.stride(), value.dtype, block.is_conj(), block.is_neg()
    kind = type(value)
    if kind is int or kind is float or kind is bool or value is None:
        return kind, value
    if isinstance(value, (list, tuple)):
        return (kind, *[described(item, tensors) for item in value])
    if isinstance(value, Mapping):
        return tuple([(key, described(item, tensors)) for key, item in value.items()])
    if isinstance(value, slice):
        return slice, described((value.start, value.stop, value.step), tensors)
    return kind, value


def without_data(x: Tensor) -> Tensor:
    """Return a tensor of the same shape and strides that has no data."""
    block = getattr(x, "local", x)
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    empty = empty.conj() if block.is_conj() else empty
    return private.negative_view(empty) if block.is_neg() else empty


def _refused_by_torch(func: Callable[..., Any], call: Any, tensors: Sequence[Tensor]) -> None:
    """Raise what torch raises for tensors of these shapes, in its own words; pass if it does not.

    Kernels without data have other words, and refuse some things that the others take.
    """
    device = "cpu" if tensors[0].is_meta else tensors[0].device
    zeros = {
        id(x): torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).zero_()
        if 0 not in x.stride() or 0 in x.shape
        else torch.zeros(1, dtype=x.dtype, device=device).as_strided(x.shape, (0,) * x.ndim)
        for x in tensors
    }
    args, kwargs = with_tensors(call, lambda x: zeros[id(x)])
    with torch.random.fork_rng():
        func(*args, **kwargs)


def _seen(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    has_autocast: bool,
) -> Preview:
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))  # whose tensors count no changes
        modes.enter_context(torch.no_grad())
        modes.enter_context(torch.random.fork_rng(devices=[]))  # `device="cpu"` would draw
        modes.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if private.dispatch_modes():  # a mode that counts operations
            modes.enter_context(private.no_modes())
        empty = [without_data(x) for x in tensors]
        numbers = {id(x): i for i, x in enumerate(tensors)}
        versions = [x._version for x in empty]
        original = args, dict(kwargs)
        args, kwargs = with_tensors(original, lambda x: empty[numbers[id(x)]])
        refused: Exception | None = None
        result = None
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:
            return UNKNOWN
        except Exception as error:
            if has_autocast or "meta" in str(error).lower():
                return UNKNOWN
            refused = error
        if refused is not None:
            is_large = sum(x.numel() for x in tensors) > _MOST_POINTS
            if is_large or getattr(func, "__name__", "") in _UNCHECKED:
                raise refused
            _refused_by_torch(func, original, tensors)
            return UNKNOWN
        changes = [i for i, x in enumerate(empty) if x._version != versions[i]]
        places = [address(x) for x in empty]
        shown = []
        for y in tensors_in(result):
            if y.layout is not torch.strided or (y.device.type != "meta" and tensors):
                return Preview(None, tuple(changes))
            same = next((i for i, x in enumerate(empty) if x is y), -1)
            at = address(y)
            shows = tuple([i for i, place in enumerate(places) if place == at])
            dtype = None if has_autocast else y.dtype
            shown.append(Shown(y.shape, dtype, y.stride(), y.is_contiguous(), same, shows))
    return Preview(tuple(shown), tuple(changes))

"""How a torch function turns the tags of its arguments into that of its result. Pure.

Cautious: whatever is not listed gives "unknown", and unknown never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Outcome = tuple[Literal["replicated", "sharded", "partial", "clash"], int | None]
"""Kind of the result and its sharded dim; "clash" for a partial and a replicated term."""


class HasKind(Protocol):
    """A tag."""

    @property
    def kind(self) -> Any:
        """Replicated, sharded or partial."""
        ...

    @property
    def dim(self) -> int | None:
        """The sharded dim, where known."""
        ...


_ADD = frozenset({"add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "__iadd__", "add_"})
_TIMES = frozenset(
    {"mul", "div", "__mul__", "__rmul__", "__truediv__", "true_divide", "mul_", "div_"}
)
_LINEAR = frozenset(
    {"neg", "__neg__", "view", "reshape", "squeeze", "unsqueeze", "flatten", "clone", "view_as"}
    | {"contiguous", "t", "to", "double", "float"}
)
_SUMS = frozenset({"sum"})
_SCATTERS = frozenset({"index_add", "index_add_", "scatter_add", "scatter_add_"})
_SELECTS = frozenset(
    {"__getitem__", "narrow", "select", "split", "chunk", "split_with_sizes", "tensor_split"}
    | {"index_select", "gather", "take", "masked_select", "unbind", "roll", "pad", "unfold"}
    | {"hsplit", "vsplit", "dsplit", "unsafe_split", "unsafe_chunk", "narrow_copy", "as_strided"}
    | {"diagonal", "diag", "tril", "triu", "take_along_dim", "select_scatter", "slice_scatter"}
    | {"diagonal_scatter", "masked_fill", "masked_fill_", "masked_scatter", "index_fill"}
    | {"__setitem__"}
)
"""Each rank may select something else of what all hold alike."""
_NUMBERED = _ADD | _TIMES | {"pow", "__pow__", "__rpow__", "pow_", "__imul__", "__itruediv__"}
_NUMBERED |= {"fill_", "__isub__"}
"""Each rank may bring another number, such as 1 on one rank and 0 on the others."""
_GRADIENTS = frozenset({"grad"})
"""Each rank gets the terms of its own share of the work."""
_CONSTANT = frozenset(
    {"zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty", "new_tensor"}
    | {"full_like", "new_full", "randn_like", "rand_like", "dim", "size", "stride", "backward"}
    | {"__get__", "__set__", "requires_grad_", "register_hook", "detach_"}
)


def result_kind(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tag_of: Callable[[Tensor], Any]
) -> Outcome | None:
    """Return what the result of `func(*args, **kwargs)` is, None for unknown."""
    name = getattr(func, "__name__", "")
    if name in _CONSTANT or name in _GRADIENTS:
        return None
    tensors = list(tensors_in((args, kwargs)))
    tags: list[HasKind | None] = [tag_of(x) for x in tensors]
    if not any(tag is not None for tag in tags):
        return None
    if name in _SCATTERS:
        source = tags[-1]
        return ("partial", None) if source is not None and source.kind == "sharded" else None
    kinds = {_kind(x, tag) for x, tag in zip(tensors, tags, strict=True)}
    if "partial" in kinds:
        return _of_partial(name, kinds, tags, args, kwargs)
    if "unknown" in kinds:
        return None
    if "sharded" not in kinds:
        differs = name in _SELECTS or (name in _NUMBERED and has_number(args, kwargs))
        return None if differs else ("replicated", None)
    sharded = next(tag for tag in tags if tag is not None and tag.kind == "sharded")
    if name in _SUMS:
        return _of_sharded_sum(sharded, tensors[0].dim(), args, kwargs)
    same_dims = name in _ADD or name in _TIMES or name in ("clone", "contiguous", "neg", "__neg__")
    return ("sharded", sharded.dim if same_dims else None)


def _of_partial(
    name: str,
    kinds: set[str],
    tags: list[HasKind | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Outcome | None:
    if name in _ADD:
        if has_number(args, kwargs):
            return None  # each rank adds the number
        if any(tag is not None and tag.kind == "replicated" for tag in tags):
            return ("clash", None)
        return ("partial", None) if kinds == {"partial"} else None
    if name in _TIMES:
        one = sum(tag is not None and tag.kind == "partial" for tag in tags) == 1
        return ("partial", None) if one and kinds <= {"partial", "replicated"} else None
    linear = name in _LINEAR or name in _SUMS
    return ("partial", None) if linear and kinds == {"partial"} else None


def _of_sharded_sum(
    tag: HasKind, dims: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Outcome | None:
    summed = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if summed is None:
        return ("partial", None)
    if tag.dim is None:
        return None
    gone = {d % dims for d in ((summed,) if isinstance(summed, int) else summed)}
    if tag.dim in gone:
        return ("partial", None)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return ("sharded", tag.dim if keeps else tag.dim - sum(d < tag.dim for d in gone))


def _kind(x: Tensor, tag: HasKind | None) -> str:
    if tag is not None:
        return tag.kind
    return "replicated" if isinstance(x, torch.nn.Parameter) else "unknown"


def has_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a plain number is among the arguments."""
    return any(isinstance(arg, int | float | complex) for arg in (*args, *kwargs.values()))


def writes_first(name: str) -> bool:
    """Whether the function of this name replaces values of its first argument."""
    if name in _CONSTANT:
        return False
    is_augmented = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return name == "__setitem__" or is_augmented or (name[-1:] == "_" and name[-2:] != "__")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors among arguments, those in lists and dictionaries too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)

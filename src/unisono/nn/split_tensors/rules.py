"""The table of rules, and what is known of a torch function before it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unisono.nn.split_tensors.cuts import NoRule
from unisono.nn.split_tensors.tensor import Split

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

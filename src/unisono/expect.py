"""Checks of plain arguments: one line each where they are used, one form of message.

They are made once, in the public function that takes the argument; code below trusts it.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Collection
from numbers import Integral
from typing import TYPE_CHECKING, TypeVar

from unisono.errors import PlatformError, explain

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = [
    "expect",
    "expect_choice",
    "expect_float",
    "expect_int",
    "is_integer",
    "number_in",
    "one_line",
    "refusal",
]

E = TypeVar("E", bound=Exception)


_SHOWN = {bool: "True, or False", int: "1", float: "0.5"}
"""What a hint shows for a kind of argument."""


def refusal(
    error: type[E],
    request: str,
    problem: str | None = None,
    arithmetic: str | None = None,
    hint: str | None = None,
) -> E:
    """Return one of Python's own errors with a four-part message; ours have `because`."""
    return error(explain(request, problem, arithmetic, hint))


def one_line(value: object) -> str:
    """Return `value` as a message shows it: only its type if the whole would take several lines."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return f"{type(value).__name__}(...)" if "\n" in text else text


def is_integer(value: object) -> TypeIs[int]:
    """Whether a value is an integer, numpy's too; neither a bool nor a tensor is one."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def expect(
    name: str, value: object, kinds: type | tuple[type, ...], hint: str | None = None
) -> None:
    """Raise TypeError unless `value` is one of `kinds`; a bool never counts as an int."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    is_stray_bool = isinstance(value, bool) and bool not in allowed
    is_allowed = isinstance(value, allowed) or (int in allowed and is_integer(value))
    if is_stray_bool or not is_allowed:
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
        problem = f"{type(value).__name__}, expected {expected}"
        if hint is None:
            hint = next(
                (f"{name}={text}" for kind, text in _SHOWN.items() if kind in allowed), None
            )
        raise TypeError(explain(f"{name}={one_line(value)}", problem, hint=hint))


def expect_int(
    name: str,
    value: int,
    at_least: int,
    below: int | None = None,
    *,
    error: type[Exception] = ValueError,
) -> int:
    """Return an integer in `[at_least, below)`, numpy's as Python's; raise `error` outside.

    >>> expect_int("parts", 4, 1)
    4
    """
    expect(name, value, int)
    value = operator.index(value)
    if value < at_least:
        problem = f"{value} < {at_least}", f"{name}={at_least} or more"
    elif below is not None and value >= below:
        problem = f"{value} >= {below}", f"{name} from {at_least} to {below - 1}"
    else:
        return value
    raise error(explain(f"{name}={value}", None, *problem))


def expect_float(
    name: str,
    value: float,
    at_least: float,
    below: float = math.inf,
    *,
    error: type[Exception] = ValueError,
) -> float:
    """Return `value` if it is a number in `[at_least, below)`; raise `error` if it is outside."""
    expect(name, value, (float, int))
    if not at_least <= value < below:
        limit = "" if math.isinf(below) else f" and below {below:g}"
        raise error(explain(f"{name}={value}", hint=f"a number of at least {at_least:g}{limit}"))
    return float(value)


def number_in(variable: str, *, at_least: float = 0.0) -> float | None:
    """Return the number that a variable of the environment holds, None if it holds nothing."""
    text = os.environ.get(variable)
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if at_least <= (value := float(text)) < math.inf:
            return value
    problem, hint = f"not a number >= {at_least:g}", f"{variable}=60, or leave it out"
    raise PlatformError.because(f"{variable}={text!r}", problem, hint=hint)


def expect_choice(
    name: str, value: str, allowed: Collection[str], *, error: type[Exception] = ValueError
) -> str:
    """Return `value` if it is one of `allowed`; raise `error` otherwise.

    >>> expect_choice("direction", "up", ["up", "down"])
    'up'
    """
    expect(name, value, str)
    if value not in allowed:
        listed = ", ".join(repr(choice) for choice in allowed)
        raise error(explain(f"{name}={value!r}", hint=f"one of {listed}"))
    return value

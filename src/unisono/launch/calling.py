"""The function of a run: whether it can be called as asked, and how ranks call it.

That is plainly, or with what DDPW's releases hand to a task. The choice is made once, in the
launcher, from the signature; ranks only follow it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from unisono.errors import PlatformError, an
from unisono.launch.settings import RUN_NAMES

if TYPE_CHECKING:
    from unisono.launch.context import Here

__all__ = ["Convention", "choose_convention"]

RESERVED = (*RUN_NAMES, "seed", "record", "watch", "elastic")
"""Keywords of `run` itself; a function that needs one of them takes `functools.partial`."""
INJECTED = ("global_rank", "local_rank", "group", "platform")
"""Keywords that a task may get from us."""
_KINDS = ("auto", "seed", "ddpw6", "plain")


@dataclass(frozen=True)
class Convention:
    """How ranks call the task."""

    kind: Literal["plain", "seed", "named"] = "plain"
    """`seed`: ranks, group and one value in front; `named`: some of `INJECTED` as keywords."""
    names: tuple[str, ...] = ()
    """Which keywords a `named` call gets."""
    takes_value: bool = True
    """Whether a `seed` call has a fourth argument."""

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        here: Here,
    ) -> Any:
        """Call the task on this rank."""
        if self.kind == "seed":
            value = (args[0] if args else None,) if self.takes_value else ()
            return fn(here.rank, here.local_rank, here.group, *value)
        offered = {
            "global_rank": here.rank,
            "local_rank": here.local_rank,
            "group": here.group,
            "platform": here.platform,
        }
        return fn(*args, **kwargs, **{name: offered[name] for name in self.names})


def choose_convention(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    asked: str = "auto",
    is_decorated: bool = False,
) -> Convention:
    """Return how to call `fn`, or raise `PlatformError` if what was given does not fit it.

    Args:
        fn: the task.
        args: what the user gave for it.
        kwargs: the same, by keyword.
        asked: `"seed"`, `"ddpw6"` or `"plain"`; `"auto"` looks at the signature.
        is_decorated: whether `fn` was called like a function, through the decorator.
    """
    if asked not in _KINDS:
        raise PlatformError.because(
            f"Wrapper(convention={asked!r})", f"choices are {', '.join(map(repr, _KINDS))}"
        )
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        check_call(fn, tuple(args), kwargs)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return Convention()  # a builtin: the call itself will tell
    positional = _positional(signature)
    if asked == "seed" or (asked == "auto" and _is_seed(positional)):
        return _seed(fn, positional, args, kwargs)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if asked == "ddpw6" or (asked == "auto" and takes_any):
        return _named(fn, signature, INJECTED, args, kwargs)
    named = _unfilled(signature, args)
    if asked == "auto" and named:
        return _named(fn, signature, named, args, kwargs)
    required = [p for p in positional if p.default is p.empty]
    has_one_tuple = len(args) == 0 or (len(args) == 1 and isinstance(args[0], tuple))
    if asked == "auto" and not is_decorated and len(required) == 4 and not kwargs and has_one_tuple:
        return _seed(fn, positional, args, kwargs)
    check_call(fn, tuple(args), kwargs)
    return Convention()


def _positional(signature: inspect.Signature) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in signature.parameters.values() if p.kind in kinds]


def _is_seed(positional: Sequence[inspect.Parameter]) -> bool:
    names = [p.name for p in positional]
    if names[:2] != ["global_rank", "local_rank"]:
        return False
    return "process_group" in names or (len(names) == 4 and "platform" not in names)


def _seed(
    fn: Callable[..., Any],
    positional: Sequence[inspect.Parameter],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Convention:
    if len(args) > 1 or kwargs:
        raise PlatformError.because(
            f"start({function_name(fn)}, ...) with global_rank, local_rank, process_group, args",
            f"{len(args)} values and keywords {sorted(kwargs)} where one value fits",
            None,
            f"start({function_name(fn)}, (first, second)): one tuple, which arrives as args",
        )
    return Convention("seed", takes_value=len(positional) > 3)


def _unfilled(signature: inspect.Signature, args: Sequence[Any]) -> tuple[str, ...]:
    """Return which of our keywords are parameters that `args` leave open."""
    filled = {p.name for p in _positional(signature)[: len(args)]}
    open_names = {
        p.name
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in filled
    }
    return tuple(name for name in INJECTED if name in open_names)


def _named(
    fn: Callable[..., Any],
    signature: inspect.Signature,
    names: tuple[str, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Convention:
    twice = [name for name in names if name in kwargs]
    if twice:
        raise PlatformError.because(
            f"start({function_name(fn)}, ..., {twice[0]}=...)",
            f"each rank gets its own {twice[0]}",
            None,
            "another name for it, or Wrapper(platform, convention='plain')",
        )
    try:
        signature.bind(*args, **kwargs, **dict.fromkeys(names))
    except TypeError as error:
        raise PlatformError.because(
            f"start({function_name(fn)}, ...) calls {function_name(fn)}{signature}",
            f"{len(args)} positional arguments, keywords {sorted(kwargs)}, and ours: "
            f"{', '.join(names)}",
            str(error),
        ) from None
    return Convention("named", names=names)


def check_call(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    of_run: Mapping[str, object] | None = None,
) -> None:
    """Raise `PlatformError` if `fn(*args, **kwargs)` cannot be called.

    Nor if one of the keywords `of_run`, given to `run` itself, is a parameter of `fn` that is still
    open: nobody can know which of the two is meant.
    """
    if not callable(fn):
        raise PlatformError.because(
            f"unisono.run({fn!r}, ...)",
            f"{an(type(fn).__name__)}, which cannot be called",
            None,
            "unisono.run(train, cfg), with the function and its arguments apart",
        )
    name = function_name(fn)
    if inspect.iscoroutinefunction(fn):
        raise PlatformError.because(
            f"unisono.run({name}, ...)",
            "a coroutine function: calling it runs nothing",
            None,
            f"lambda: asyncio.run({name}(...))",
        )
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise PlatformError.because(
            f"unisono.run({name}, ...)",
            "a generator function: calling it runs nothing",
            None,
            f"lambda: list({name}(...))",
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # builtins without a signature: the call itself will tell
    for word, value in (of_run or {}).items():
        if value is not None and word in signature.parameters:
            _check_is_ours(fn, signature, args, word, value)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = [
            word
            for word in RESERVED
            if (p := signature.parameters.get(word)) is not None
            and p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        hint = (
            f"functools.partial({name}, {wanted[0]}=...): run takes {wanted[0]} itself"
            if wanted
            else f"unisono.run({name}, ...) with the arguments of its signature"
        )
        raise PlatformError.because(
            f"unisono.run({name}, ...) calls {name}{signature}",
            f"{len(args)} positional arguments and keywords {sorted(kwargs)}",
            str(error),
            hint,
        ) from None


def _check_is_ours(
    fn: Callable[..., object],
    signature: inspect.Signature,
    args: Sequence[object],
    word: str,
    value: object,
) -> None:
    """Raise `PlatformError` unless a partial or an argument fills the parameter of that name."""
    filled = {p.name for p in _positional(signature)[: len(args)]}
    if isinstance(fn, functools.partial):
        filled |= fn.keywords.keys()
    parameter = signature.parameters[word]
    by_name = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    if word not in filled and parameter.kind in by_name:
        name = function_name(fn)
        raise PlatformError.because(
            f"unisono.run({name}, ..., {word}={value!r})",
            f"run takes {word} itself, and {name} has a parameter of that name",
            None,
            f"unisono.run(functools.partial({name}, {word}=...), ...): that one is "
            f"{name}'s; {word}= beside it is run's",
        )


def function_name(fn: object) -> str:
    """Return a name to show for `fn`."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__

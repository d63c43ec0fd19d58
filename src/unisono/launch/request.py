"""What a caller of `run` asks for, checked before any process starts."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError, an
from unisono.launch.configuration import NAMES, RUN_NAMES, read_configuration
from unisono.launch.device import Device
from unisono.launch.logs import Logs, checked_logs
from unisono.launch.places import resolve
from unisono.launch.platform import Platform

RESERVED = (*RUN_NAMES, "seed", "record", "watch")
"""Keywords of `run` itself; a function that needs one of them takes `functools.partial`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request."""

    fn: Callable[..., object]
    """The function."""
    args: tuple[object, ...]
    """Its positional arguments."""
    kwargs: Mapping[str, object]
    """Its keyword arguments."""
    place: str
    """Where it runs, as `on` says it."""
    platform: Platform
    """The same with all its details; a copy of the caller's."""
    timeout_s: float | None
    """Deadline of the function."""
    max_restarts: int
    """Attempts after the first."""
    logs: Logs
    """What happens to the output."""
    is_explicit: bool
    """Whether the caller named a place or a number of ranks."""
    name: str
    """What is run: the function, or the script."""
    is_script: bool = False
    """Whether it is a whole script, which may initialise torch.distributed by itself."""
    seed: int | None = None
    """What the caller wants ranks to be seeded with, rank r with `seed + r`."""
    decided_by_file: str = ""
    """A line that says what a settings file decides; empty if there is none."""

    @property
    def ranks(self) -> int:
        """On how many ranks."""
        return self.platform.world_size


def checked_request(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    on: str | Device | Platform | None,
    ranks: int | None,
    nodes: int | None,
    timeout_s: float | None,
    max_restarts: int | None,
    logs: str | Path | Logs | None,
    is_called_plainly: bool = True,
    fields: Mapping[str, Any] | None = None,
    title: str | None = None,
    is_script: bool = False,
    seed: int | None = None,
) -> Request:
    """Return the request, or raise `PlatformError` that says what is wrong with it.

    What the caller leaves open comes from `UNISONO_*` variables, else from `unisono.toml`.
    `is_called_plainly` is false where ranks add arguments of their own to the call; `fields` are
    more fields of the platform that the caller gives; `title` is shown instead of the function;
    `is_script` leaves it to the function when its ranks join their world; `seed` is that of `run`.
    """
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise PlatformError.because(
                f"unisono.run(..., seed={seed!r})", "not an integer >= 0", None, "seed=0"
            )
        fields = {**(fields or {}), "seed": seed}
    if is_called_plainly:
        check_call(fn, args, kwargs)
    is_explicit = ranks is not None or on not in (None, "auto")
    configuration = read_configuration()
    arguments = {"ranks": ranks, "nodes": nodes, "timeout_s": timeout_s, "logs": logs, "on": on}
    arguments["max_restarts"] = max_restarts
    given = {*(name for name, value in arguments.items() if value is not None), *(fields or ())}
    if isinstance(on, Platform):
        given |= {name for name in NAMES if name in ("ranks", "nodes") or on.is_explicit(name)}
    else:
        on = configuration.value("on") if on is None else on
        configuration = configuration.at(on)
        ranks = configuration.value("ranks") if ranks is None else ranks
        nodes = configuration.value("nodes") if nodes is None else nodes
    timeout_s = configuration.value("timeout_s") if timeout_s is None else timeout_s
    max_restarts = configuration.value("max_restarts") if max_restarts is None else max_restarts
    logs = configuration.value("logs") if logs is None else logs
    for name, count in (("ranks", ranks), ("nodes", nodes)):
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int) or count < 1
        ):
            raise PlatformError.because(
                f"unisono.run(..., {name}={count!r})",
                f"a number of {name} is a whole number, 1 or more",
                None,
                f"{name}=2",
            )
    place, platform = resolve(
        on, ranks=ranks, nodes=nodes, configuration=configuration, fields=fields
    )
    timeout_s, max_restarts = _checked_limits(timeout_s, max_restarts)
    return Request(
        fn=fn,
        args=args,
        kwargs=kwargs,
        place=place,
        platform=platform,
        timeout_s=timeout_s,
        max_restarts=max_restarts,
        logs=checked_logs(logs, platform.world_size),
        is_explicit=is_explicit,
        name=title or function_name(fn),
        is_script=is_script,
        seed=seed,
        decided_by_file=f"unisono: {configuration.path} decides: {', '.join(decided)}"
        if (decided := configuration.from_file(given))
        else "",
    )


def check_names(fn: Callable[..., object], args: tuple[object, ...], **given: object) -> None:
    """Raise `PlatformError` if a keyword given to `run` is a parameter of `fn`, too.

    Nobody can know which of the two is meant. What a partial or a positional argument fills is
    settled.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    filled = [p.name for p in parameters.values() if p.kind in kinds][: len(args)]
    if isinstance(fn, functools.partial):
        filled += fn.keywords
    for name, value in given.items():
        parameter = parameters.get(name)
        if value is None or parameter is None or name in filled:
            continue
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            fn_name = function_name(fn)
            raise PlatformError.because(
                f"unisono.run({fn_name}, ..., {name}={value!r})",
                f"run takes {name} itself, and {fn_name} has a parameter of that name",
                None,
                f"unisono.run(functools.partial({fn_name}, {name}=...), ...): that one is "
                f"{fn_name}'s; {name}= beside it is run's",
            )


def _checked_limits(timeout_s: Any, max_restarts: Any) -> tuple[float | None, int]:
    """Return deadline and number of restarts, or raise `PlatformError`."""
    is_time = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_time and timeout_s > 0):
        raise PlatformError.because(
            f"unisono.run(..., timeout_s={timeout_s!r})",
            "no time in seconds, more than 0",
            None,
            "timeout_s=3600",
        )
    is_count = isinstance(max_restarts, int) and not isinstance(max_restarts, bool)
    if max_restarts is not None and not (is_count and max_restarts >= 0):
        raise PlatformError.because(
            f"unisono.run(..., max_restarts={max_restarts!r})",
            "no whole number from 0 on",
            None,
            "max_restarts=2",
        )
    is_endless = timeout_s is not None and math.isinf(timeout_s)
    return None if is_endless else timeout_s, max_restarts or 0


def check_call(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raise `PlatformError` if `fn(*args, **kwargs)` cannot be called."""
    if not callable(fn):
        raise PlatformError.because(
            f"unisono.run({fn!r}, ...)",
            f"{an(type(fn).__name__)}, which cannot be called",
            None,
            "unisono.run(train, cfg), with the function and its arguments apart",
        )
    if inspect.iscoroutinefunction(fn):
        raise PlatformError.because(
            f"unisono.run({function_name(fn)}, ...)",
            "a coroutine function: calling it runs nothing",
            None,
            f"lambda: asyncio.run({function_name(fn)}(...))",
        )
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise PlatformError.because(
            f"unisono.run({function_name(fn)}, ...)",
            "a generator function: calling it runs nothing",
            None,
            f"lambda: list({function_name(fn)}(...))",
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # builtins without a signature: the call itself will tell
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = [name for name in RESERVED if _requires(signature, name)]
        hint = (
            f"functools.partial({function_name(fn)}, {wanted[0]}=...): run takes {wanted[0]} itself"
            if wanted
            else f"unisono.run({function_name(fn)}, ...) with the arguments of its signature"
        )
        raise PlatformError.because(
            f"unisono.run({function_name(fn)}, ...) calls {function_name(fn)}{signature}",
            f"{len(args)} positional arguments and keywords {sorted(kwargs)}",
            str(error),
            hint,
        ) from None


def _requires(signature: inspect.Signature, name: str) -> bool:
    parameter = signature.parameters.get(name)
    return (
        parameter is not None
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def function_name(fn: object) -> str:
    """Return a name to show for `fn`."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__

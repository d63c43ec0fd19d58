"""What a caller of `run` asks for, checked before any process starts."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import PlatformError
from unisono.launch.logs import Logs, checked_logs

RESERVED = ("on", "ranks", "nodes", "timeout_s", "max_restarts", "logs")
"""Keywords of `run` itself; a function that needs one of them takes `functools.partial`."""
PLACES = ("cpu", "inline")
"""Places where this release starts ranks."""
PLANNED_PLACES = ("gpu", "mps", "mpi", "slurm")
DEFAULT_RANKS = {"cpu": 2, "inline": 1}


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
    """Where it runs: one of `PLACES`."""
    ranks: int
    """On how many ranks."""
    timeout_s: float | None
    """Deadline of the function."""
    max_restarts: int
    """Attempts after the first."""
    logs: Logs
    """What happens to the output."""
    is_explicit: bool
    """Whether the caller named a place or a number of ranks."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return function_name(self.fn)


def checked_request(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    on: str | None,
    ranks: int | None,
    nodes: int | None,
    timeout_s: float | None,
    max_restarts: int | None,
    logs: str | Path | Logs | None,
) -> Request:
    """Return the request, or raise `PlatformError` that says what is wrong with it."""
    check_call(fn, args, kwargs)
    place = checked_place(on)
    count = _checked_ranks(ranks, place)
    if nodes not in (None, 1):
        raise PlatformError.because(
            f"unisono.run(..., on={place!r}, nodes={nodes!r})",
            "ranks on one host only, this one",
            None,
            "torchrun --nnodes starts ranks on several hosts; unisono.run joins its world",
        )
    for name, value in (("timeout_s", timeout_s), ("max_restarts", max_restarts)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise PlatformError.because(f"unisono.run(..., {name}={value!r})", "not a number")
    if timeout_s is not None and timeout_s <= 0:
        raise PlatformError.because(
            f"unisono.run(..., timeout_s={timeout_s:g})", "no time at all", None, "timeout_s=3600"
        )
    if max_restarts is not None and max_restarts < 0:
        raise PlatformError.because(
            f"unisono.run(..., max_restarts={max_restarts})", "a negative number"
        )
    return Request(
        fn=fn,
        args=args,
        kwargs=kwargs,
        place=place,
        ranks=count,
        timeout_s=timeout_s,
        max_restarts=int(max_restarts or 0),
        logs=checked_logs(logs, count),
        is_explicit=ranks is not None or on not in (None, "auto"),
    )


def checked_place(on: str | None) -> str:
    """Return where to run: `on` itself, or the CPU where nothing is said."""
    if on is None or on == "auto":
        return "cpu"
    if on in PLACES:
        return on
    available = f"this release starts ranks on: {', '.join(map(repr, PLACES))}"
    if on in PLANNED_PLACES:
        raise PlatformError.because(
            f"unisono.run(..., on={on!r})",
            f"{available} ({', '.join(map(repr, PLANNED_PLACES))} are planned)",
            None,
            'on="cpu" rehearses the same function on processes; under torchrun it joins that world',
        )
    near = difflib.get_close_matches(str(on), (*PLACES, *PLANNED_PLACES, "auto"), n=1)
    raise PlatformError.because(
        f"unisono.run(..., on={on!r})",
        available,
        None,
        f"did you mean on={near[0]!r}?" if near else 'on="cpu"',
    )


def _checked_ranks(ranks: int | None, place: str) -> int:
    if ranks is None:
        return DEFAULT_RANKS[place]
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise PlatformError.because(
            f"unisono.run(..., ranks={ranks!r})",
            "a number of ranks is a whole number, 1 or more",
            None,
            f"ranks={max(1, DEFAULT_RANKS[place])}",
        )
    if place == "inline" and ranks > 1:
        raise PlatformError.because(
            f'unisono.run(..., on="inline", ranks={ranks})',
            "one process, this one",
            f"{ranks} ranks > 1 process",
            f'on="cpu", ranks={ranks}',
        )
    return ranks


def check_call(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raise `PlatformError` if `fn(*args, **kwargs)` cannot be called."""
    if not callable(fn):
        raise PlatformError.because(
            f"unisono.run({fn!r}, ...)",
            f"a {type(fn).__name__}, which cannot be called",
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

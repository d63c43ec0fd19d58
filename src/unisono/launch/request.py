"""What a caller of `run` asks for, checked before any process starts.

Here `on` becomes a checked platform: it may be a word, a profile, a `Device` or a `Platform`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError, an
from unisono.launch import devices
from unisono.launch.devices import Device
from unisono.launch.elastic.settings import Chaos, Elastic, bounds, checked
from unisono.launch.logs import Logs, checked_logs
from unisono.launch.platform import COUNT_OR_ZERO, KINDS, Platform
from unisono.launch.settings import NAMES, RUN_NAMES, Configuration, read_configuration

PLACES = ("cpu", "gpu", "mps", "mpi", "slurm", "inline")
"""Places where ranks can be started."""
RESERVED = (*RUN_NAMES, "seed", "record", "watch", "elastic")
"""Keywords of `run` itself; a function that needs one of them takes `functools.partial`."""
_OF_ONE_HOST = ("cpu", "gpu", "cuda", "mps")
_DEFAULT_RANKS = {"cpu": 2, "mps": 1, "mpi": 2, "inline": 1}
_TRACES = ("RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "SLURM_STEP_ID")
"""One of these variables is there in every process that a launcher started as a rank."""


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
    elastic: Elastic | None = None
    """How the job may grow and shrink; None: its first death ends it."""
    decided_by_file: str = ""
    """A line that says what a settings file decides; empty if there is none."""

    @property
    def ranks(self) -> int:
        """On how many ranks."""
        return self.platform.world_size

    @property
    def joins_world(self) -> bool:
        """Whether it runs in the world that this process is a rank of."""
        return self.platform.detect and is_in_world()


def checked_request(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    on: str | Device | Platform | None,
    ranks: int | tuple[int, int] | None,
    nodes: int | None,
    timeout_s: float | None,
    max_restarts: int | None,
    logs: str | Path | Logs | None,
    elastic: bool | None = None,
    chaos: Chaos | None = None,
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
    `is_script` leaves it to the function when its ranks join their world; `seed` and `elastic` are
    those of `run`; `chaos` kills ranks of an elastic job.
    """
    if seed is not None:
        COUNT_OR_ZERO.check("seed", seed, "unisono.run(..., {})")
        fields = {**(fields or {}), "seed": seed}
    if is_called_plainly:
        check_call(fn, args, kwargs)
    least, ranks = bounds(ranks, elastic)
    is_explicit = ranks is not None or on not in (None, "auto")
    configuration = read_configuration()
    asked: dict[str, Any] = {"on": on, "ranks": ranks, "nodes": nodes, "timeout_s": timeout_s}
    asked |= {"max_restarts": max_restarts, "logs": logs}
    given = {*(name for name, value in asked.items() if value is not None), *(fields or ())}
    if isinstance(on, Platform):
        given |= {name for name in NAMES if name in ("ranks", "nodes") or on.is_explicit(name)}
        left_open = ("timeout_s", "max_restarts", "logs")
    else:
        asked["on"] = configuration.value("on") if on is None else on
        configuration = configuration.at(asked["on"])
        left_open = RUN_NAMES
    for name in left_open:
        if asked[name] is None:
            asked[name] = configuration.value(name)
    for name in ("ranks", "nodes", "timeout_s", "max_restarts"):
        if asked[name] is not None:
            KINDS[name].check(name, asked[name], "unisono.run(..., {})")
    place, platform = resolve(
        asked["on"],
        ranks=asked["ranks"],
        nodes=asked["nodes"],
        configuration=configuration,
        fields=fields,
    )
    decided = configuration.from_file(given)
    grows = checked(place, platform, least, chaos)
    if grows is not None:  # members meet at their coordinator, and nowhere else
        platform = platform.but(ipc_groups=None)
    is_endless = asked["timeout_s"] is not None and math.isinf(asked["timeout_s"])
    return Request(
        fn=fn,
        args=args,
        kwargs=kwargs,
        place=place,
        platform=platform,
        timeout_s=None if is_endless else asked["timeout_s"],
        max_restarts=asked["max_restarts"] or 0,
        logs=checked_logs(asked["logs"], platform.world_size),
        is_explicit=is_explicit,
        name=title or function_name(fn),
        is_script=is_script,
        seed=seed,
        elastic=grows,
        decided_by_file=f"unisono: {configuration.path} decides: {', '.join(decided)}"
        if decided
        else "",
    )


def resolve(
    on: str | Device | Platform | None,
    *,
    ranks: int | None,
    nodes: int | None,
    configuration: Configuration,
    fields: Mapping[str, Any] | None = None,
) -> tuple[str, Platform]:
    """Return the place and a private, checked platform.

    Args:
        on: what the caller, a file or a variable says; None chooses.
        ranks: number of ranks over all nodes, where the caller says it.
        nodes: number of nodes, where the caller says it.
        configuration: settings at that place, for the fields that the caller leaves open.
        fields: more fields of the platform that the caller gives.
    """
    forced = os.environ.get("UNISONO_FORCE_ON")
    given = {**configuration.fields(), **(fields or {})}
    if isinstance(on, Platform):
        own = {name for name in given if on.is_explicit(name)}.difference(fields or ())
        platform = on.but(**{name: value for name, value in given.items() if name not in own})
        place = platform.kind.value
        keeps_size = bool(forced)
    else:
        spread = nodes or given.get("n_nodes", 1)
        keeps_size = forced in _OF_ONE_HOST and isinstance(spread, int) and spread > 1
        place, platform = _from_word(
            on if keeps_size else forced or on, configuration, ranks, given
        )
    sizes = {"ranks": ranks, "n_nodes": nodes}
    platform = platform.but(**{name: size for name, size in sizes.items() if size is not None})
    if forced and keeps_size:
        size = platform.world_size
        platform = platform.but(device=forced, n_nodes=1)
        if platform.world_size != size:
            platform = platform.but(ranks=size)
        place = platform.kind.value
    platform.check()
    if not (platform.detect and is_in_world()):  # else that world counts, whatever is asked for
        platform.check_machine()
    if place == "inline" and platform.world_size > 1:
        raise PlatformError.because(
            f'unisono.run(..., on="inline", ranks={platform.world_size})',
            "one process, this one",
            f"{platform.world_size} ranks > 1 process",
            f'on="cpu", ranks={platform.world_size}',
        )
    return place, platform


def _from_word(
    on: str | Device | None,
    configuration: Configuration,
    ranks: int | None,
    given: Mapping[str, Any],
) -> tuple[str, Platform]:
    word = on.value if isinstance(on, Device) else on
    if word is None or word == "auto":
        word = "gpu" if devices.visible_gpus() else "cpu"
    elif isinstance(word, str) and word in configuration.profiles:
        word = Device.from_str(configuration.profiles[word]["device"]).value
    if word == "inline":
        return word, Platform.at(Device.CPU, {**given, "ranks": ranks or 1})
    word = known_place(word, configuration)
    platform = Platform.at(Device.from_str(word), given)
    sizes = ("ranks", "n_gpus_per_node", "n_cpus_per_node")
    if platform.kind is Device.GPU and not platform.is_explicit("n_gpus_per_node"):
        platform = platform.but(n_gpus_per_node=max(1, devices.visible_gpus()))
    elif word in _DEFAULT_RANKS and ranks is None and not any(map(platform.is_explicit, sizes)):
        platform = platform.but(ranks=_DEFAULT_RANKS[word])
    return word, platform


def known_place(word: object, configuration: Configuration) -> str:
    """Return the usual spelling of a place or profile, or explain which there are."""
    if isinstance(word, str):
        if word in PLACES or word in configuration.profiles:
            return word
        if word.strip().lower() in ("cuda", *PLACES):
            return Device.from_str(word).value
    places = [*PLACES, *configuration.profiles]
    near = difflib.get_close_matches(str(word), (*places, "auto"), n=1)
    raise PlatformError.because(
        f"unisono.run(..., on={word!r})",
        f"ranks can be started on: {', '.join(map(repr, places))}",
        None,
        f"did you mean on={near[0]!r}?" if near else 'on="cpu"',
    )


def is_in_world() -> bool:
    """Whether this process is a rank already, by its process group or by its environment.

    Asked often, and answered without torch.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return True
    if not any(name in os.environ for name in _TRACES):
        return False
    from unisono.environment import detect

    return detect().is_world


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
        wanted = [
            name
            for name in RESERVED
            if (p := signature.parameters.get(name)) is not None
            and p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
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


def function_name(fn: object) -> str:
    """Return a name to show for `fn`."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__

"""The request of a caller of `run`, checked before any process starts.

First the function: whether it can be called with these arguments. Then the place: `on`, a word, a
profile, a `Device` or a `Platform`, becomes a checked platform.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono import accelerator
from unisono.errors import PYTHON, PlatformError, Spelling, an
from unisono.expect import expect
from unisono.launch.checks import (
    COUNT,
    COUNT_OR_ZERO,
    SECONDS,
    check_machine,
    check_platform,
    nearest,
)
from unisono.launch.elastic.settings import Elastic, bounds, checked
from unisono.launch.logs import Logs, checked_logs, warn
from unisono.launch.platform import FIELDS, Device, Platform
from unisono.launch.settings import NAMES, RUN_NAMES, Configuration, read_configuration
from unisono.removed import REMOVED

RESERVED = (*RUN_NAMES, "hosts", "seed", "check", "elastic", "record", "watch")
"""Keywords of `run` itself; a function that needs one of them takes `functools.partial`."""
_KEYWORD, _NONE = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
_KINDS = {"ranks": COUNT, "nodes": COUNT, "timeout_s": SECONDS, "max_restarts": COUNT_OR_ZERO}
"""What arguments of `run` may be."""


def check_call(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    of_run: Mapping[str, object] | None = None,
) -> None:
    """Raise `PlatformError` if `fn(*args, **kwargs)` cannot be called.

    Also if a keyword of `run` itself, in `of_run`, names a parameter of `fn` that is still open: it
    could be meant for either.
    """
    if not callable(fn):
        raise PlatformError.because(
            f"unisono.run({fn!r}, ...)",
            f"{an(type(fn).__name__)}, which cannot be called",
            hint="unisono.run(train, cfg), with the function and its arguments apart",
        )
    name = function_name(fn)
    is_coroutine = inspect.iscoroutinefunction(fn)
    if is_coroutine or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        kind, caller = ("coroutine", "asyncio.run") if is_coroutine else ("generator", "list")
        raise PlatformError.because(
            f"unisono.run({name}, ...)",
            f"a {kind} function: calling it runs nothing",
            hint=f"lambda: {caller}({name}(...))",
        )
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # builtins without a signature: the call itself will tell
    parameters = signature.parameters
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    filled = [n for n in [*parameters][: len(args)] if parameters[n].kind is not _KEYWORD]
    for word, value in (of_run or {}).items():
        is_open = word not in filled and word not in bound
        if value is not None and is_open and _takes(signature, word):
            raise PlatformError.because(
                f"unisono.run({name}, ..., {word}={value!r})",
                f"run takes {word} itself, and {name} has a parameter of that name",
                hint=f"functools.partial({name}, {word}=...) for {name}; {word}= is run's",
            )
    near: dict[str, object] = {}
    for word, value in kwargs.items():
        if word not in parameters and (option := _option_like(word)) is not None:
            near[option] = value
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        missing = [w for w in RESERVED if _takes(signature, w) and parameters[w].default is _NONE]
        hint = f"unisono.run({name}, ...) with what its signature takes"
        if near:
            hint = f"did you mean {PYTHON.options(**near)}?"
        if missing:
            hint = f"functools.partial({name}, {missing[0]}=...): run takes {missing[0]} itself"
        raise PlatformError.because(
            f"unisono.run({name}, ...) calls {name}{signature}",
            f"{len(args)} positional arguments and keywords {sorted(kwargs)}",
            str(error),
            hint,
        ) from None
    if near:
        options = PYTHON.options(**near)
        warn(f"unisono.run({name}, ...) hands its keywords to {name}; did you mean {options}?")


def _takes(signature: inspect.Signature, word: str) -> bool:
    """Whether a function has a parameter that can be given by this name."""
    parameter = signature.parameters.get(word)
    return parameter is not None and parameter.kind in (_KEYWORD, parameter.POSITIONAL_OR_KEYWORD)


def _option_like(word: str) -> str | None:
    """Return the option of `run` that a keyword resembles closely, if any."""
    options = [option for option in RESERVED if option != "on"]  # which is like too many words
    return next(iter(difflib.get_close_matches(word, options, n=1, cutoff=0.8)), None)


def function_name(fn: object) -> str:
    """Return a name to show for `fn`."""
    if isinstance(fn, functools.partial):
        return function_name(fn.func)
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


PLACES = ("cpu", "gpu", "mps", "mpi", "ray", "slurm", "inline")
"""Places where ranks can be started."""
_INSTEAD = {
    "ssh": REMOVED["unisono.Device.SSH"],
    **dict.fromkeys(("pbs", "lsf"), "mpiexec or torchrun in the batch script: run joins its ranks"),
}
"""What to write for places where ranks cannot be started."""
_DEFAULT_RANKS = {"cpu": 2, "mps": 1, "mpi": 2, "ray": 2, "inline": 1}
_SIZES = frozenset(("ranks", "n_gpus_per_node", "n_cpus_per_node", "hosts", "n_nodes"))
_NO_FIELDS = frozenset((*RUN_NAMES, "device"))
_TRACES = frozenset(
    ("RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "SLURM_STEP_ID")
)
"""One of these variables is there in every process that a launcher started as a rank."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A checked request."""

    fn: Callable[..., object]
    """The function."""
    args: tuple[object, ...]
    """Its positional arguments."""
    kwargs: Mapping[str, object]
    """Its keyword arguments."""
    place: str
    """Where it runs, as `on` spells it."""
    platform: Platform
    """The same with all its details; a copy of the caller's."""
    ranks: int
    """On how many ranks."""
    joins_world: bool
    """Whether it runs in the world that this process is a rank of."""
    timeout_s: float | None
    """Deadline of the function."""
    max_restarts: int
    """Attempts after the first."""
    logs: Logs
    """What happens to the output."""
    is_explicit: bool
    """Whether the caller named a place or a number of ranks."""
    name: str
    """Name of the function or the script."""
    is_script: bool = False
    """Whether it is a whole script, which may initialise torch.distributed."""
    seed: int | None = None
    """Seed of the ranks, rank r gets `seed + r`."""
    check: bool | None = None
    """Whether ranks look for silent mistakes; None: as `UNISONO_CHECK` says."""
    elastic: Elastic | None = None
    """How the job may grow and shrink; None: the death of a rank ends it."""
    preload: tuple[str, ...] = ()
    """Modules that the warm server loads before it forks the ranks."""
    decided_by_file: str = ""
    """A line that says what a settings file decides; else empty."""
    spelling: Spelling = PYTHON
    """How the caller writes options, in errors."""


def checked_request(
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    on: str | Device | Platform | None,
    ranks: int | tuple[int, int] | None = None,
    nodes: int | None = None,
    timeout_s: float | None = None,
    max_restarts: int | None = None,
    logs: str | Path | Logs | None = None,
    hosts: Sequence[str] | None = None,
    seed: int | None = None,
    check: bool | None = None,
    elastic: bool | None = None,
    fields: Mapping[str, Any] | None = None,
    title: str | None = None,
    is_script: bool = False,
    spelling: Spelling = PYTHON,
) -> RunRequest:
    """Return the request, or raise `PlatformError` that says what is wrong with it.

    What the caller leaves open comes from `unisono.toml`. The first options are those of `run`.
    `fields` are more fields of the platform that the caller gives; `title` is shown instead of the
    function; `is_script` leaves it to the function when its ranks join their world; `spelling` is
    how the caller writes options, in errors. That the call fits the function is for the caller to
    check (`check_call`).
    """
    least = None
    if elastic or isinstance(ranks, (tuple, list)):
        least, ranks = bounds(ranks, elastic, spelling)
    requested: dict[str, Any] = {"on": on, "ranks": ranks, "nodes": nodes, "timeout_s": timeout_s}
    requested = _without_none(**requested, max_restarts=max_restarts, logs=logs)
    fields = {**(fields or {}), **_without_none(hosts=hosts, seed=seed)}
    if fields.get("hosts") and nodes == 1 < len(fields["hosts"]):
        call = spelling.run(nodes=1, hosts=list(fields["hosts"]))
        raise PlatformError.because(
            call, f"1 node != {len(fields['hosts'])} hosts", hint="leave nodes out"
        )
    if seed is not None:
        COUNT_OR_ZERO.check("seed", seed, "run", spelling)
    configuration = read_configuration()
    left_open = ("timeout_s", "max_restarts", "logs")
    if not isinstance(on, Platform):
        configuration, left_open = configuration.at(on), RUN_NAMES
    settings = {n: v for n, v in configuration.settings.items() if n in left_open}
    resolved = {**dict.fromkeys(RUN_NAMES), **settings, **requested}
    for name, kind in _KINDS.items():
        if resolved[name] is not None:
            kind.check(name, resolved[name], "run", spelling)
    sizes = _without_none(ranks=resolved["ranks"], n_nodes=resolved["nodes"])
    place, platform = resolve(resolved["on"], {**fields, **sizes}, configuration, spelling)
    if check is not None:
        expect("check", check, bool)
        platform = platform.but(env={**(platform.env or {}), "UNISONO_CHECK": str(int(check))})
    joins_world = platform.detect and is_in_world()
    if not joins_world:  # else that world counts, whatever is asked for
        check_machine(platform, spelling)
    grows = None
    if least is not None:
        grows = checked(place, platform, least, spelling)
    if grows is not None:
        # Members meet at their coordinator, and nowhere else. MKL is to take the same way through
        # a sum at any address, and cuBLAS at any time.
        variables = {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        platform = platform.but(ipc_groups=None, env={**variables, **(platform.env or {})})
    explicit = {*requested, *fields}
    if isinstance(on, Platform):
        explicit |= {name for name in NAMES if name not in FIELDS or on.is_explicit(name)}
    is_endless = resolved["timeout_s"] == math.inf
    return RunRequest(
        fn=fn,
        args=args,
        kwargs=kwargs,
        place=place,
        platform=platform,
        ranks=platform.world_size,
        joins_world=joins_world,
        timeout_s=None if is_endless else resolved["timeout_s"],
        max_restarts=resolved["max_restarts"] or 0,
        logs=checked_logs(resolved["logs"], platform.world_size, spelling),
        is_explicit=ranks is not None or on not in (None, "auto"),
        name=title or function_name(fn),
        is_script=is_script,
        seed=seed,
        check=check,
        elastic=grows,
        decided_by_file=configuration.decisions(explicit),
        spelling=spelling,
    )


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def resolve(
    on: str | Device | Platform | None,
    fields: Mapping[str, Any],
    configuration: Configuration,
    spelling: Spelling = PYTHON,
) -> tuple[str, Platform]:
    """Return the place and a private platform that makes sense on some machine.

    Args:
        on: what the caller or a file says; None chooses.
        fields: those of the platform that the caller gives.
        configuration: settings at that place, for the fields that the caller leaves open.
        spelling: how the caller writes options, in errors.
    """
    forced = os.environ.get("UNISONO_FORCE_ON")
    settings = {name: v for name, v in configuration.settings.items() if name not in _NO_FIELDS}
    if isinstance(on, Platform):
        left_open = {name: v for name, v in settings.items() if not on.is_explicit(name)}
        platform = on.but(**{**left_open, **fields})
        place, keeps_size = platform.kind.value, bool(forced)
    else:
        fields = {**settings, **fields}
        nodes = fields.get("n_nodes", 1)
        is_spread = bool(fields.get("hosts")) or (isinstance(nodes, int) and nodes > 1)
        keeps_size = is_spread and forced is not None and _is_of_one_host(forced)
        word = on if keeps_size else forced or on
        place, platform = _from_word(word, fields, configuration, spelling)
    if forced and keeps_size:
        size = platform.world_size
        platform = platform.but(device=forced, n_nodes=1, hosts=())
        if platform.world_size != size:
            platform = platform.but(ranks=size)
        place = platform.kind.value
    check_platform(platform, spelling)
    if place == "inline" and (size := platform.world_size) > 1:
        raise PlatformError.because(
            spelling.run(on="inline", ranks=size),
            "one process, this one",
            f"{size} ranks > 1 process",
            spelling.options(on="cpu", ranks=size),
        )
    return place, platform


def _from_word(
    on: str | Device | None,
    fields: Mapping[str, Any],
    configuration: Configuration,
    spelling: Spelling,
) -> tuple[str, Platform]:
    """Return the place that a word means, and its platform with these fields."""
    if on is None or on == "auto":
        word = "gpu" if accelerator.kind() not in (None, "mps") else "cpu"
    else:
        word = known_place(on.value if isinstance(on, Device) else on, configuration, spelling)
        if word in configuration.profiles:
            word = configuration.profiles[word]["device"]
    if word == "inline":
        return word, Platform(**{"ranks": _DEFAULT_RANKS[word], **fields, "device": Device.CPU})
    device = Device.from_str(word)
    defaults: dict[str, Any] = {}
    if device is Device.GPU:
        defaults["n_gpus_per_node"] = max(1, accelerator.count(None if word == "gpu" else word))
        if fields.get("n_gpus_per_node") == 0 and "ranks" not in fields:
            call = spelling.platform(device=word, n_gpus_per_node=0)
            raise PlatformError.because(call, "no rank at all", hint=spelling.options(on="cpu"))
    elif device.value in _DEFAULT_RANKS and not _says_size(fields):
        defaults["ranks"] = _DEFAULT_RANKS[device.value]
    return device.value, Platform(**{**defaults, **fields, "device": word})


def _says_size(fields: Mapping[str, Any]) -> bool:
    """Whether fields say how many ranks there are; one node alone does not."""
    sizes = {name: value for name, value in fields.items() if name in _SIZES and value}
    return bool(sizes) and sizes != {"n_nodes": 1}


def _is_of_one_host(word: str) -> bool:
    """Whether the ranks of a place are processes of one host."""
    return word in ("cpu", "gpu") or accelerator.is_kind(word)


def known_place(word: object, configuration: Configuration, spelling: Spelling = PYTHON) -> str:
    """Return the usual spelling of a place or profile, or explain which there are."""
    places = [*PLACES, *configuration.profiles]
    if isinstance(word, str):
        if word in places:
            return word
        spelled = word.strip().lower()
        accelerator.refuse_number(spelled)
        if spelled in PLACES or (spelled not in _INSTEAD and accelerator.is_kind(spelled)):
            return spelled
    near = nearest(str(word), (*places, "auto"))
    suggestion = (
        f"did you mean {spelling.options(on=near)}?" if near else spelling.options(on="cpu")
    )
    raise PlatformError.because(
        spelling.run(on=word),
        f"ranks can be started on: {', '.join(map(repr, places))}",
        hint=_INSTEAD.get(str(word).strip().lower(), suggestion),
    )


def is_in_world() -> bool:
    """Whether this process is a rank already, by its process group or by its environment.

    Asked often, and answered without torch.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return True
    if _TRACES.isdisjoint(os.environ):
        return False
    from unisono.environment import detect

    return detect().is_world

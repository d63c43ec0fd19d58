"""The request of a caller of `run`, checked before any process starts.

First the function: whether it can be called with these arguments, and how ranks call it, plainly or
with the arguments that DDPW passes to a task. The launcher decides that once, from the signature.

Then the place: `on`, a word, a profile, a `Device` or a `Platform`, becomes a checked platform.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unisono import accelerator
from unisono.errors import PYTHON, PlatformError, Spelling, an
from unisono.expect import expect, expect_choice
from unisono.launch.checks import check_machine, check_platform
from unisono.launch.elastic.settings import Elastic, bounds, checked
from unisono.launch.fields import COUNT_OR_ZERO, nearest
from unisono.launch.logs import Logs, checked_logs, warn
from unisono.launch.platform import FIELDS, KINDS, Device, Platform
from unisono.launch.settings import NAMES, RUN_NAMES, Configuration, read_configuration
from unisono.removed import REMOVED

if TYPE_CHECKING:
    from unisono.launch.context import Here

RESERVED = (*RUN_NAMES, "hosts", "seed", "check", "elastic", "record", "watch")
"""Keywords of `run` itself; a function that needs one of them takes `functools.partial`."""
INJECTED = ("global_rank", "local_rank", "group", "platform")
"""Keywords that a task may get from us."""
_KINDS = ("auto", "seed", "ddpw6", "plain")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
    kind: str = "auto",
    is_decorated: bool = False,
) -> Convention:
    """Return how to call `fn`, or raise `PlatformError` if the arguments do not fit it.

    Args:
        fn: the task.
        args: its positional arguments.
        kwargs: its keyword arguments.
        kind: `"seed"`, `"ddpw6"` or `"plain"`; `"auto"` looks at the signature.
        is_decorated: whether `fn` was called like a function, through the decorator.
    """
    expect_choice("convention", kind, _KINDS, error=PlatformError)
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        check_call(fn, tuple(args), kwargs)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return Convention()  # a builtin: the call itself will tell
    positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    names = [p.name for p in positional]
    is_seed = names[:2] == ["global_rank", "local_rank"] and (
        "process_group" in names or (len(names) == 4 and "platform" not in names)
    )
    if kind == "seed" or (kind == "auto" and is_seed):
        return _seed(fn, positional, args, kwargs)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if kind == "ddpw6" or (kind == "auto" and takes_any):
        return _named(fn, signature, INJECTED, args, kwargs)
    by_name = {p.name for p in signature.parameters.values() if p.kind in _BY_NAME}
    open_names = by_name.difference(names[: len(args)])
    if kind == "auto" and not open_names.isdisjoint(INJECTED):
        ours = tuple(name for name in INJECTED if name in open_names)
        return _named(fn, signature, ours, args, kwargs)
    required = [p for p in positional if p.default is p.empty]
    has_one_tuple = len(args) == 0 or (len(args) == 1 and isinstance(args[0], tuple))
    if kind == "auto" and not is_decorated and len(required) == 4 and not kwargs and has_one_tuple:
        return _seed(fn, positional, args, kwargs)
    check_call(fn, tuple(args), kwargs)
    return Convention()


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

    Also if a keyword of `run` itself, in `of_run`, names a parameter of `fn` that is still open: it
    could be meant for either.
    """
    if not callable(fn):
        raise PlatformError.because(
            f"unisono.run({fn!r}, ...)",
            f"{an(type(fn).__name__)}, which cannot be called",
            None,
            "unisono.run(train, cfg), with the function and its arguments apart",
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
    filled = list(signature.parameters)[: len(args)]
    for word, value in (of_run or {}).items():
        p = signature.parameters.get(word)
        if value is None or p is None or p.kind not in _BY_NAME:
            continue
        if word in filled and p.kind is p.POSITIONAL_OR_KEYWORD:
            continue
        if isinstance(fn, functools.partial) and word in fn.keywords:
            continue
        raise PlatformError.because(
            f"unisono.run({name}, ..., {word}={value!r})",
            f"run takes {word} itself, and {name} has a parameter of that name",
            hint=f"unisono.run(functools.partial({name}, {word}=...), ...): that one is {name}'s; "
            f"{word}= beside it is run's",
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        open_options = [
            word
            for word in RESERVED
            if (p := signature.parameters.get(word)) is not None
            and p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        hint = f"unisono.run({name}, ...) with the arguments of its signature"
        if open_options:
            word = open_options[0]
            hint = f"functools.partial({name}, {word}=...): run takes {word} itself"
        elif near := _like_options(kwargs, signature):
            hint = f"did you mean {PYTHON.options(**near)}?"
        raise PlatformError.because(
            f"unisono.run({name}, ...) calls {name}{signature}",
            f"{len(args)} positional arguments and keywords {sorted(kwargs)}",
            str(error),
            hint,
        ) from None
    if kwargs and (near := _like_options(kwargs, signature)):
        words = " and ".join(word for word in kwargs if _option_like(word) in near)
        warn(
            f"unisono.run({name}, ...) hands {words} to {name}, which takes any keyword; "
            f"did you mean {PYTHON.options(**near)}?"
        )


def _option_like(word: str) -> str | None:
    """Return the option of `run` that a keyword resembles closely, if any."""
    options = [option for option in RESERVED if option != "on"]  # which is like too many words
    return next(iter(difflib.get_close_matches(word, options, n=1, cutoff=0.8)), None)


def _like_options(kwargs: Mapping[str, object], signature: inspect.Signature) -> dict[str, object]:
    """Return options of `run` that unknown keywords of the function resemble."""
    free = {word: value for word, value in kwargs.items() if word not in signature.parameters}
    near = {_option_like(word): value for word, value in free.items()}
    return {option: value for option, value in near.items() if option is not None}


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
    convention: Convention = field(default_factory=Convention)
    """How ranks call the function."""
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
    convention: Convention | None = None,
    spelling: Spelling = PYTHON,
) -> RunRequest:
    """Return the request, or raise `PlatformError` that says what is wrong with it.

    What the caller leaves open comes from `unisono.toml`. The first options are those of `run`.
    `fields` are more fields of the platform that the caller gives; `title` is shown instead of the
    function; `is_script` leaves it to the function when its ranks join their world; `convention`
    says how ranks call it; `spelling` is how the caller writes options, in errors. That the call
    fits the function is for the caller to check (`check_call`).
    """
    least = None
    if elastic or isinstance(ranks, (tuple, list)):
        least, ranks = bounds(ranks, elastic, spelling)
    requested: dict[str, Any] = {"on": on, "ranks": ranks, "nodes": nodes, "timeout_s": timeout_s}
    requested |= {"max_restarts": max_restarts, "logs": logs}
    requested = {name: value for name, value in requested.items() if value is not None}
    fields = dict(fields or {})
    if hosts is not None:
        fields["hosts"] = hosts
    if fields.get("hosts") and nodes == 1 < len(fields["hosts"]):
        finding = f"1 node != {len(fields['hosts'])} hosts"
        call = spelling.run(nodes=1, hosts=list(fields["hosts"]))
        raise PlatformError.because(
            call, finding, hint="leave nodes out: it is the number of hosts"
        )
    if seed is not None:
        COUNT_OR_ZERO.check("seed", seed, "run", spelling)
        fields["seed"] = seed
    configuration = read_configuration()
    left_open = ("timeout_s", "max_restarts", "logs")
    if not isinstance(on, Platform):
        configuration, left_open = configuration.at(on), RUN_NAMES
    settings = {n: s.value for n, s in configuration.settings.items() if n in left_open}
    resolved = {**dict.fromkeys(RUN_NAMES), **settings, **requested}
    for name in ("ranks", "nodes", "timeout_s", "max_restarts"):
        if resolved[name] is not None:
            KINDS[name].check(name, resolved[name], "run", spelling)
    sizes = {"ranks": resolved["ranks"], "n_nodes": resolved["nodes"]}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    place, platform = resolve(resolved["on"], {**fields, **sizes}, configuration, spelling)
    if check is not None:
        expect("check", check, bool)
        variables = {**(platform.env or {}), "UNISONO_CHECK": str(int(check))}
        platform = platform.but(env=variables)
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
        variables |= platform.env or {}
        platform = platform.but(ipc_groups=None, env=variables)
    decided = ""
    if configuration.path is not None:
        explicit = {*requested, *fields}
        if isinstance(on, Platform):
            explicit |= {name for name in NAMES if name not in FIELDS or on.is_explicit(name)}
        decided = configuration.decisions(explicit)
    is_endless = resolved["timeout_s"] is not None and math.isinf(resolved["timeout_s"])
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
        convention=convention or Convention(),
        decided_by_file=decided,
        spelling=spelling,
    )


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
    settings = {
        name: setting.value
        for name, setting in configuration.settings.items()
        if name not in (*RUN_NAMES, "device")
    }
    if isinstance(on, Platform):
        left_open = {
            name: v for name, v in settings.items() if name in FIELDS and not on.is_explicit(name)
        }
        platform = on.but(**{**left_open, **fields})
        place, keeps_size = platform.kind.value, bool(forced)
    else:
        fields = {**settings, **fields}
        nodes = fields.get("n_nodes", 1)
        is_spread = bool(fields.get("hosts")) or (isinstance(nodes, int) and nodes > 1)
        keeps_size = is_spread and forced is not None and _is_of_one_host(forced)
        place, platform = _from_word(
            on if keeps_size else forced or on, fields, configuration, spelling
        )
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

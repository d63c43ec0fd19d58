"""What a caller of `run` asks for, checked before any process starts.

Here `on` becomes a checked platform: it may be a word, a profile, a `Device` or a `Platform`.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError
from unisono.launch import devices
from unisono.launch.calling import Convention, function_name
from unisono.launch.devices import Device
from unisono.launch.elastic.settings import Chaos, Elastic, bounds, checked
from unisono.launch.logs import Logs, checked_logs
from unisono.launch.platform import COUNT_OR_ZERO, KINDS, Platform
from unisono.launch.settings import NAMES, RUN_NAMES, Configuration, read_configuration

PLACES = ("cpu", "gpu", "mps", "mpi", "ssh", "ray", "slurm", "inline")
"""Places where ranks can be started."""
SCHEDULERS = ("pbs", "lsf")
"""Schedulers for which batch scripts can be written (`places/batch.py`)."""
_OF_ONE_HOST = ("cpu", "gpu", "cuda", "mps")
_DEFAULT_RANKS = {"cpu": 2, "mps": 1, "mpi": 2, "ray": 2, "inline": 1}
_SIZES = frozenset(("ranks", "n_gpus_per_node", "n_cpus_per_node"))
_TRACES = frozenset(
    ("RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "SLURM_STEP_ID")
)
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
    """What is run: the function, or the script."""
    is_script: bool = False
    """Whether it is a whole script, which may initialise torch.distributed by itself."""
    seed: int | None = None
    """What the caller wants ranks to be seeded with, rank r with `seed + r`."""
    elastic: Elastic | None = None
    """How the job may grow and shrink; None: its first death ends it."""
    convention: Convention = field(default_factory=Convention)
    """How ranks call the function."""
    decided_by_file: str = ""
    """A line that says what a settings file decides; empty if there is none."""


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
    hosts: Sequence[str] | None = None,
    elastic: bool | None = None,
    chaos: Chaos | None = None,
    invite: str | None = None,
    join: str | None = None,
    fields: Mapping[str, Any] | None = None,
    title: str | None = None,
    is_script: bool = False,
    seed: int | None = None,
    convention: Convention | None = None,
) -> Request:
    """Return the request, or raise `PlatformError` that says what is wrong with it.

    What the caller leaves open comes from `UNISONO_*` variables, else from `unisono.toml`.
    `fields` are more fields of the platform that the caller gives; `title` is shown instead of the
    function; `is_script` leaves it to the function when its ranks join their world; `seed`, `hosts`
    and `elastic` are those of `run`; `chaos` kills ranks of an elastic job, `invite` and `join` are
    files by which hosts share one; `convention` says how ranks call the function. That the call
    fits the function is for the caller to check (`calling.py`).
    """
    if hosts is not None:
        fields = {**(fields or {}), "hosts": hosts}
    if seed is not None:
        COUNT_OR_ZERO.check("seed", seed, "unisono.run(..., {})")
        fields = {**(fields or {}), "seed": seed}
    least, ranks = bounds(ranks, elastic)
    asked: dict[str, Any] = {"on": on, "ranks": ranks, "nodes": nodes, "timeout_s": timeout_s}
    asked |= {"max_restarts": max_restarts, "logs": logs}
    configuration = read_configuration()
    if isinstance(on, Platform):
        left_open = ("timeout_s", "max_restarts", "logs")
    else:
        configuration = configuration.at(on)
        left_open = RUN_NAMES
    wanted = dict(asked)
    for name in left_open:
        if asked[name] is None and name in configuration.settings:
            wanted[name] = configuration.settings[name].value
    for name in ("ranks", "nodes", "timeout_s", "max_restarts"):
        if wanted[name] is not None:
            KINDS[name].check(name, wanted[name], "unisono.run(..., {})")
    place, platform = resolve(
        wanted["on"],
        ranks=wanted["ranks"],
        nodes=wanted["nodes"],
        configuration=configuration,
        fields=fields,
    )
    joins_world = platform.detect and is_in_world()
    if not joins_world:  # else that world counts, whatever is asked for
        platform.check_machine()
    grows = checked(place, platform, least, chaos, invite, join)
    if grows is not None:  # members meet at their coordinator, and nowhere else
        platform = platform.but(ipc_groups=None)
    size = platform.world_size
    decided = ""
    if configuration.path is not None:
        given = {name for name, value in asked.items() if value is not None}.union(fields or ())
        if isinstance(on, Platform):
            given |= {name for name in NAMES if name in ("ranks", "nodes") or on.is_explicit(name)}
        decided = configuration.decisions(given)
    is_endless = wanted["timeout_s"] is not None and math.isinf(wanted["timeout_s"])
    return Request(
        fn=fn,
        args=args,
        kwargs=kwargs,
        place=place,
        platform=platform,
        ranks=size,
        joins_world=joins_world,
        timeout_s=None if is_endless else wanted["timeout_s"],
        max_restarts=wanted["max_restarts"] or 0,
        logs=checked_logs(wanted["logs"], size),
        is_explicit=ranks is not None or on not in (None, "auto"),
        name=title or function_name(fn),
        is_script=is_script,
        seed=seed,
        elastic=grows,
        convention=convention or Convention(),
        decided_by_file=decided,
    )


def resolve(
    on: str | Device | Platform | None,
    *,
    ranks: int | None,
    nodes: int | None,
    configuration: Configuration,
    fields: Mapping[str, Any] | None = None,
) -> tuple[str, Platform]:
    """Return the place and a private platform that makes sense on some machine.

    Args:
        on: what the caller, a file or a variable says; None chooses.
        ranks: number of ranks over all nodes, where the caller says it.
        nodes: number of nodes, where the caller says it.
        configuration: settings at that place, for the fields that the caller leaves open.
        fields: more fields of the platform that the caller gives.
    """
    forced = os.environ.get("UNISONO_FORCE_ON")
    given = {**configuration.fields(), **(fields or {})}
    sizes: dict[str, Any] = {}
    if ranks is not None:
        sizes["ranks"] = ranks
    if nodes is not None:
        sizes["n_nodes"] = nodes
    if isinstance(on, Platform):
        own = {name for name in given if on.is_explicit(name)}.difference(fields or ())
        open_ones = {name: value for name, value in given.items() if name not in own}
        platform = on.but(**open_ones, **sizes)
        place = platform.kind.value
        keeps_size = bool(forced)
    else:
        spread = nodes or given.get("n_nodes", 1)
        is_spread = "hosts" in given or (isinstance(spread, int) and spread > 1)
        keeps_size = forced in _OF_ONE_HOST and is_spread
        word = on if keeps_size else forced or on
        place, platform = _from_word(word, configuration, {**given, **sizes})
    if forced and keeps_size:
        size = platform.world_size
        platform = platform.but(device=forced, n_nodes=1, hosts=())
        if platform.world_size != size:
            platform = platform.but(ranks=size)
        place = platform.kind.value
    platform.check()
    if place == "inline" and platform.world_size > 1:
        raise PlatformError.because(
            f'unisono.run(..., on="inline", ranks={platform.world_size})',
            "one process, this one",
            f"{platform.world_size} ranks > 1 process",
            f'on="cpu", ranks={platform.world_size}',
        )
    return place, platform


def _from_word(
    on: str | Device | None, configuration: Configuration, given: Mapping[str, Any]
) -> tuple[str, Platform]:
    """Return the place that a word means, and its platform with these fields given."""
    word = on.value if isinstance(on, Device) else on
    if word is None or word == "auto":
        word = "gpu" if devices.visible_gpus() else "cpu"
    elif isinstance(word, str) and word in configuration.profiles:
        word = Device.from_str(configuration.profiles[word]["device"]).value
    elif word not in PLACES:
        word = known_place(word, configuration)
    device = Device.CPU if word == "inline" else Device(word)
    defaults: dict[str, Any] = {}
    if device is Device.GPU:
        defaults["n_gpus_per_node"] = max(1, devices.visible_gpus())
    elif word == "inline" or (word in _DEFAULT_RANKS and _SIZES.isdisjoint(given)):
        defaults["ranks"] = _DEFAULT_RANKS[word]
    return word, Platform.at(device, {**defaults, **given})


def known_place(word: object, configuration: Configuration) -> str:
    """Return the usual spelling of a place or profile, or explain which there are."""
    if isinstance(word, str):
        if word in PLACES or word in configuration.profiles:
            return word
        if word.strip().lower() in ("cuda", *PLACES):
            return Device.from_str(word).value
    places = [*PLACES, *configuration.profiles]
    near = difflib.get_close_matches(str(word), (*places, "auto"), n=1)
    if word in SCHEDULERS:
        raise PlatformError.because(
            f"unisono.run(..., on={word!r})",
            "ranks are started inside a job of that scheduler, not from here",
            None,
            f"unisono run --script {word} ... train.py prints a batch script to submit",
        )
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
    if _TRACES.isdisjoint(os.environ):
        return False
    from unisono.environment import detect

    return detect().is_world

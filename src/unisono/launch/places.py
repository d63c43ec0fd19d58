"""From what `on` says to a checked platform: a word, a profile, a `Device` or a `Platform`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from unisono.errors import PlatformError
from unisono.launch import accelerators
from unisono.launch.configuration import Configuration
from unisono.launch.detection import is_in_world
from unisono.launch.device import Device
from unisono.launch.platform import Platform
from unisono.launch.platform_checks import check_machine, check_platform

PLACES = ("cpu", "gpu", "mps", "mpi", "slurm", "inline")
"""Places where ranks can be started."""
_OF_ONE_HOST = ("cpu", "gpu", "cuda", "mps")
DEFAULT_RANKS = {"cpu": 2, "mps": 1, "mpi": 2, "inline": 1}


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
    fields = fields or {}
    if isinstance(on, Platform):
        platform = on.copy()
        platform.fill(configuration.fields())
        for name, value in fields.items():
            setattr(platform, name, value)
        place = platform.kind.value
        keeps_size = bool(forced)
    else:
        spread = nodes or {**configuration.fields(), **fields}.get("n_nodes", 1)
        keeps_size = forced in _OF_ONE_HOST and isinstance(spread, int) and spread > 1
        word = on if keeps_size else forced or on
        place, platform = _from_word(word, configuration, ranks, fields)
    if ranks is not None:
        platform.ranks = ranks
    if nodes is not None:
        platform.n_nodes = nodes
    if forced and keeps_size:
        place = _force(platform, forced)
    check_platform(platform)
    if not (platform.detect and is_in_world()):  # else that world counts, whatever is asked for
        check_machine(platform)
    if place == "inline" and platform.world_size > 1:
        raise PlatformError.because(
            f'unisono.run(..., on="inline", ranks={platform.world_size})',
            "one process, this one",
            f"{platform.world_size} ranks > 1 process",
            f'on="cpu", ranks={platform.world_size}',
        )
    return place, platform


def _force(platform: Platform, forced: str) -> str:
    """Put the platform on another device with as many ranks as it had; return the new place."""
    size = platform.world_size
    platform.device = Device.from_str(forced)
    platform.n_nodes = 1
    if platform.world_size != size:
        platform.ranks = size
    return platform.kind.value


def _from_word(
    on: str | Device | None,
    configuration: Configuration,
    ranks: int | None,
    fields: Mapping[str, Any],
) -> tuple[str, Platform]:
    word = on.value if isinstance(on, Device) else on
    if word is None or word == "auto":
        word = "gpu" if accelerators.visible_gpus() else "cpu"
    elif isinstance(word, str) and word in configuration.profiles:
        word = Device.from_str(configuration.profiles[word]["device"]).value
    given = {**configuration.fields(), **fields}
    if word == "inline":
        return word, Platform.of_place("cpu", {**given, "device": "cpu", "ranks": ranks or 1})
    word = known_place(word, configuration)
    platform = Platform.of_place(word, {**given, "device": word})
    is_counted = ranks is not None or platform.ranks is not None
    if platform.kind is Device.GPU and not platform.is_explicit("n_gpus_per_node"):
        platform.n_gpus_per_node = max(1, accelerators.visible_gpus())
    elif not is_counted and word in DEFAULT_RANKS:
        counts = ("n_gpus_per_node", "n_cpus_per_node")
        if not any(platform.is_explicit(name) for name in counts):
            platform.ranks = DEFAULT_RANKS[word]
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

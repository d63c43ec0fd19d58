"""Settings from `unisono.toml`.

Order: defaults, the file (`[run]`, then a profile), arguments; the later one wins.
`UNISONO_FORCE_ON` alone goes before an argument, so that a GPU script runs on a laptop unchanged
(`request.py`).

A file may say which program starts ranks, and with which variables. So a file that another user
could have written is never used.
"""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError
from unisono.launch.checks import nearest
from unisono.launch.logs import warn
from unisono.launch.platform import FIELDS

FILE_NAME = "unisono.toml"
RUN_NAMES = ("on", "ranks", "nodes", "timeout_s", "max_restarts", "logs")
"""Arguments of `run` itself."""
NAMES = {*FIELDS, *RUN_NAMES} - {"upon_finish", "upon_error"}
"""What a file may set."""
_SIZES = frozenset(("ranks", "n_nodes", "n_gpus_per_node", "n_cpus_per_node"))
"""What says how many ranks there are."""
_VARIABLES = frozenset(
    f"UNISONO_{word}"
    for word in (
        *("ALGO", "BACKEND", "CHECK", "CORE", "DETECT", "FORCE_ON", "FRAMES", "HOST_ID"),
        *("JOB_DIR", "KEY_FILE", "RANK_PID", "REQUIRE", "RESTART", "RUN_ID", "SERVER_IDLE_S"),
        *("STDIN_RANK", "STRUCTURE_CHECK", "TIMEOUT_S", "TRACE"),
    )
)
_FAMILIES = tuple(f"UNISONO_{word}_" for word in ("SHM", "MPI", "TEST", "SLURM"))


@dataclass(frozen=True)
class Configuration:
    """All settings that were found."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`on="NAME"` -> fields of its platform."""
    path: Path | None = None
    """The file, if there is one."""

    def at(self, place: object) -> Configuration:
        """Return the settings at a place, else at that which they name: a profile's go before.

        A profile that says how many ranks it has does not get `[run]`'s number of them.
        """
        if place is None:
            place = self.settings.get("on")
        if not isinstance(place, str) or place not in self.profiles:
            return self
        profile = self.profiles[place]
        dropped = set() if _SIZES.isdisjoint(profile) else {"nodes", *_SIZES}
        general = {n: value for n, value in self.settings.items() if n not in dropped}
        return replace(self, settings={**general, **profile})

    def decisions(self, explicit: Collection[str]) -> str:
        """Return a line on what the file decides beside what is `explicit` in the call; or "".

        Of a table only the names are shown: variables for the ranks may be secrets.
        """
        decided = [
            f"{name}={sorted(value) if isinstance(value, dict) else value!r}"
            for name, value in self.settings.items()
            if name not in explicit
        ]
        return f"unisono: {self.path} decides: {', '.join(decided)}" if decided else ""


def read_configuration() -> Configuration:
    """Read the file in force for this process, in its working directory.

    Raises:
        PlatformError: the file makes no sense, or others could have written it.
    """
    _look_at_variables()
    path = find_file(Path.cwd())
    if path is None:
        return Configuration()
    settings, profiles = _read_file(path)
    if "device" in settings:  # of all fields of a platform, this one is an argument of `run`
        settings.setdefault("on", settings.pop("device"))
    return Configuration(settings, profiles, path)


def find_file(directory: Path) -> Path | None:
    """Return the nearest file upwards.

    The search ends at a directory with `.git`, which is where a project ends, and at the home
    directory. A file of another user on the way is passed over with a warning: users who may write
    to `/tmp` or `/scratch` could otherwise have this user run what they like, or nothing at all.
    """
    home: Path | None = None
    with suppress(OSError, RuntimeError):  # a user without a home
        home = Path.home().resolve()
    for folder in (directory, *directory.parents):
        path = folder / FILE_NAME
        if path.is_file():
            if (owner := _strange_owner(path)) is None:
                return path
            warn(
                f"{path} is not used: it belongs to user {owner}, and what it says could run "
                f"programs in your name; a copy that belongs to you is used"
            )
        if (folder / ".git").exists() or folder.resolve() == home:
            break
    return None


def _strange_owner(path: Path, *opened: os.stat_result) -> int | None:
    """Return who owns the file, or the link to it, if neither this user nor root does."""
    owners = [status.st_uid for status in (path.lstat(), path.stat(), *opened)]
    return next((owner for owner in owners if owner not in (0, os.getuid())), None)


_said: set[str] = set()


def say_once(line: str) -> None:
    """Print once in a process which file decides where and how its ranks run."""
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the table `[run]` and the profiles of a file that no other user could have written."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # of the very file that is read, whatever is renamed
            text = file.read().decode("utf-8")
        owner, mode = _strange_owner(path, status), stat.S_IMODE(status.st_mode)
        content = {} if owner is not None or mode & 0o022 else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise PlatformError.because(f"the settings in {path}", f"{error}") from error
    if owner is not None or mode & 0o022:
        kind = f"its owner is user {owner}" if owner is not None else f"its mode is {mode:04o}"
        raise PlatformError.because(
            f"the settings in {path}, which may say which programs run in your name",
            f"{kind}, so another user could have written it",
            hint=f"chmod go-w {path}" if owner is None else "a copy of your own",
        )
    content = _table(content, str(path), ("run", "platform"), "tables")
    run = _table(content.get("run", {}), f"[run] of {path}", NAMES, "settings")
    profiles: dict[str, dict[str, Any]] = {}
    for name, entries in _table(content.get("platform", {}), f"[platform] of {path}").items():
        where = f"[platform.{name}] of {path}"
        profiles[name] = _table(entries, where, FIELDS, "fields")
        if "device" not in profiles[name]:
            hint = 'device = "cpu" (or "gpu", "slurm", ...)'
            raise PlatformError.because(where, "no device in it", hint=hint)
    return run, profiles


def _table(
    value: Any, where: str, names: Collection[str] | None = None, what: str = ""
) -> dict[str, Any]:
    """Return a table whose keys, where these are not free, are known."""
    if not isinstance(value, dict):
        raise PlatformError.because(where, f"{value!r} where a table is expected")
    for key in value:
        if names is not None and key not in names:
            near = nearest(key, names)
            raise PlatformError.because(
                f"{key} in {where}",
                f"{what} are {', '.join(sorted(names))}",
                hint=f"did you mean {near}?" if near else None,
            )
    return value


def _look_at_variables() -> None:
    """Warn about variables that mean nothing to us."""
    for variable in sorted(os.environ):
        is_known = variable in _VARIABLES or variable.startswith(_FAMILIES)
        if variable.startswith("UNISONO_") and not is_known:
            hint = f"settings are in {FILE_NAME}"
            if near := nearest(variable, _VARIABLES):
                hint = f"did you mean {near}?"
            warn(f"{variable} means nothing to unisono; {hint}")

"""What kind of value each field of a platform, and each argument of `run`, takes.

Read off the annotations of the fields, so that a new field is checked without a word here.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from unisono.errors import PlatformError, an
from unisono.launch.platform import OLD_NAMES, Platform


@dataclass(frozen=True)
class Kind:
    """A kind of value."""

    what: str
    """In words."""
    python: str
    """An example as Python has it."""
    toml: str
    """The same in a file, a variable or on the command line."""
    fits: Callable[[Any], bool]
    """Whether a value is of this kind."""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


_WORDS = Kind("a list of words", '["-v", "-x"]', '\'["-v", "-x"]\'', _is_words)
_KINDS = {
    "str": Kind("a word", '"word"', "word", lambda v: isinstance(v, str)),
    "int": Kind("a whole number", "2", "2", _is_whole),
    "float": Kind("a number", "60.0", "60.0", lambda v: _is_whole(v) or isinstance(v, float)),
    "bool": Kind("yes or no", "True", "true", lambda v: isinstance(v, bool)),
    "dict[str, str]": Kind(
        "a table of words",
        '{"NAME": "value"}',
        "'{NAME = \"value\"}'",
        lambda v: _is_table(v) and all(isinstance(word, str) for word in v.values()),
    ),
    "dict[str, Any]": Kind(
        "a table", '{"account": "physics"}', "'{account = \"physics\"}'", _is_table
    ),
    "Sequence[str]": _WORDS,
    "tuple[str, ...]": _WORDS,
    "list[list[int]]": Kind(
        "a list of lists of ranks",
        "[[0, 1], [2, 3]]",
        "'[[0, 1], [2, 3]]'",
        lambda v: isinstance(v, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in v),
    ),
}
_ARGUMENTS = {"nodes": "int", "timeout_s": "float", "max_restarts": "int"}
_ANNOTATIONS = {f.name: str(f.type) for f in fields(Platform)} | _ARGUMENTS
_PATHS = ("console_logs", "mpiexec")


def kind_of(name: str) -> Kind | None:
    """Return the kind of value that a field or argument takes; None where any will do."""
    annotation = _ANNOTATIONS.get(OLD_NAMES.get(name, name), "")
    return _KINDS.get(annotation.removesuffix(" | None"))


def check_kinds(platform: Platform) -> None:
    """Raise `PlatformError` for a field that is not of the kind that it takes."""
    for name in (f.name for f in fields(Platform)):
        value, kind = getattr(platform, name), kind_of(name)
        if kind is None or kind.fits(value) or (name in _PATHS and isinstance(value, PathLike)):
            continue
        if value is None and _ANNOTATIONS[name].endswith(" | None"):
            continue
        example = kind.python
        if kind is _WORDS and isinstance(value, str):
            example = repr(shlex.split(value) or [value])
        raise PlatformError.because(
            f"Platform({name}={value!r})",
            f"{an(type(value).__name__)}, where {kind.what} is needed",
            None,
            f"{name}={example}",
        )

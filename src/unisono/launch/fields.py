"""What a field of a platform, or an argument of `run`, may be.

A `Kind` checks one value, wherever it was written: in Python, in `unisono.toml` or in a shell.
"""

from __future__ import annotations

import difflib
import os
import shlex
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from unisono import accelerator
from unisono.errors import PYTHON, PlatformError, Spelling
from unisono.expect import is_integer

BACKENDS = ("gloo", *accelerator.BACKENDS, "shm", "mpi")
"""What `backend` may say, as `unisono.comm.backends` has it; that would load torch here."""


def nearest(word: str, names: Collection[str]) -> str | None:
    """Return the name that `word` begins, or is most like; None if it is like none."""
    begun = [name for name in sorted(names) if name.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, names, n=1)), None)


@dataclass(frozen=True)
class Kind:
    """A kind of value, and how it is checked."""

    what: str
    """In words."""
    example: Any
    """A value that fits."""
    fits: Callable[[Any], bool]
    """Whether a value is of this kind."""
    words: tuple[str, ...] = ()
    """The choices, if there are few."""

    def check(self, name: str, value: Any, call: str, spelling: Spelling = PYTHON) -> None:
        """Raise `PlatformError` unless `value`, given as `name`, is of this kind.

        Args:
            name: name of the field.
            value: its value.
            call: `"run"` or `"platform"`, where it was given; `""` shows it alone.
            spelling: how the caller writes it.
        """
        if self.fits(value):
            return
        example = self.example
        if isinstance(example, list) and isinstance(value, str):
            example = shlex.split(value) or [value]
        if self.words:
            example = nearest(str(value), self.words) or example
        is_alike = type(value) is type(self.example)
        spell = {"run": spelling.run, "platform": spelling.platform}.get(call, spelling.options)
        raise PlatformError.because(
            spell(**{name: value}),
            f"not {self.what}" if is_alike else f"{type(value).__name__}, not {self.what}",
            hint=spelling.options(**{name: example}),
        )


def _is_integer(value: Any, at_least: float = -float("inf")) -> bool:
    return is_integer(value) and value >= at_least


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_signal(value: Any) -> bool:
    return value in signal.Signals.__members__


def _is_seconds(value: Any) -> bool:
    return (_is_integer(value) or isinstance(value, float)) and value > 0


def _is_torch_backend(value: Any) -> bool:
    """Whether torch is to check it: a map of kinds of devices to backends, or one of a plugin."""
    if not _is_text(value):
        return False
    return ":" in value or value == "mpi4py" or accelerator.is_backend(value)  # mpi4py is DDPW's


def one_of(*words: str, also: Callable[[Any], bool] = lambda _: False) -> Kind:
    """Return the kind of a value that is one of few words."""
    listed = ", ".join(map(repr, words))
    return Kind(f"one of {listed}", words[0], lambda v: v in words or also(v), words)


COUNT = Kind("an integer >= 1", 2, lambda v: _is_integer(v, 1))
COUNT_OR_ZERO = Kind("an integer >= 0", 2, lambda v: _is_integer(v, 0))
INTEGER = Kind("an integer", 2, _is_integer)
SECONDS = Kind("a number of seconds > 0", 60.0, _is_seconds)
FINITE_SECONDS = Kind(
    "a finite number of seconds > 0", 60.0, lambda v: _is_seconds(v) and v < float("inf")
)
MINUTES = Kind("a number of minutes, an integer >= 1", 60, COUNT.fits)
PORT = Kind("a port, 1 to 65535", 29400, lambda v: _is_integer(v, 1) and v < 65536)
FLAG = Kind("True or False", True, lambda v: isinstance(v, bool))
TEXT = Kind("a string", "word", _is_text)
PATH = Kind("a path", "word", lambda v: isinstance(v, (str, os.PathLike)))
SIGNAL = Kind("the name of a signal", "SIGUSR1", _is_signal)
SIGNALS = Kind("names of signals", ["SIGTERM"], lambda v: _is_list(v, _is_signal))
STRINGS = Kind("a list of strings", ["-v", "-x"], lambda v: _is_list(v, _is_text))
BACKEND = one_of(*BACKENDS, also=_is_torch_backend)
GROUPS = Kind(
    "a list of lists of ranks",
    [[0, 1], [2, 3]],
    lambda v: _is_list(v, lambda group: isinstance(group, (list, tuple))),
)
TABLE = Kind(
    "a table with strings as names",
    {"account": "physics"},
    lambda v: isinstance(v, dict) and all(map(_is_text, v)),
)
VARIABLES = Kind(
    "a table of strings",
    {"NAME": "value"},
    lambda v: isinstance(v, dict) and all(map(_is_text, (*v, *v.values()))),
)

"""Words of a command line: values that are read from them, and arguments that errors spell as them.

`SHELL` spells the options of `unisono run` in errors that the library raises.
"""

from __future__ import annotations

import ast
import contextlib
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.errors import PlatformError, Spelling


class ShellSpelling(Spelling):
    """Arguments as they are typed in a shell: options of a command.

    Args:
        command: the command that was typed; others than `run` check places and ranks as it does.
    """

    _OPTIONS: Mapping[str, str] = {
        "device": "--on",
        "n_nodes": "--nodes",
        "n_gpus_per_node": "--gpus",
    }
    _SAME = (
        *("on", "ranks", "rank", "nodes", "partition", "timeout_s", "max_restarts", "logs"),
        *("console", "hosts"),
    )
    _FLAGS = ("elastic", "check", "detach")

    def __init__(self, command: str = "run") -> None:
        self._command = command

    def options(self, **values: Any) -> str:
        """Return options side by side.

        Example:
            >>> SHELL.options(ranks=2, hosts=["a", "b"], seed=1)
            '--ranks 2 --hosts a,b --set seed=1'
            >>> SHELL.options(ranks=(2, 8), elastic=True)
            '--ranks 2:8 --elastic'
        """
        words: list[str] = []
        for name, value in values.items():
            if name in self._FLAGS:
                words += [f"--{name}"] if value else []
            elif name in self._OPTIONS or name in self._SAME:
                between = ":" if name == "ranks" else ","
                is_list = isinstance(value, (list, tuple))
                text = between.join(map(str, value)) if is_list else str(value)
                option = self._OPTIONS.get(name, f"--{name.replace('_', '-')}")
                words += [option, shlex.quote(text)]
            else:
                words += ["--set", shlex.quote(f"{name}={_toml(value)}")]
        return " ".join(words)

    def run(self, **values: Any) -> str:
        """Return the command with these options."""
        return f"unisono {self._command} {self.options(**values)}"

    platform = run


def _toml(value: Any) -> str:
    """Return a value as `--set` reads it."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return f"{{{', '.join(f'{name} = {_quoted(v)}' for name, v in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(_quoted, value))}]"
        case _:
            return str(value)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else _toml(value)


SHELL = ShellSpelling()


def parse_words(words: Sequence[str]) -> tuple[list[object], dict[str, object]]:
    """Read words as arguments: Python literals, else strings; `name=value` are keywords.

    Example:
        >>> parse_words(["3", "adam", "lr=0.1"])
        ([3, 'adam'], {'lr': 0.1})
    """
    positional: list[object] = []
    keywords: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            keywords[name] = _literal(value)
        else:
            positional.append(_literal(word))
    return positional, keywords


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_pairs(words: Sequence[str], usage: str) -> list[tuple[str, str]]:
    """Read words of the form `name=value`."""
    pairs: list[tuple[str, str]] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise PlatformError.because(f"unisono run ... {word}", "no = in it", hint=usage)
        pairs.append((name, value))
    return pairs


def parse_field(name: str, text: str) -> object:
    """Read the value of a field of `Platform` as Python or TOML, else as a plain string."""
    from unisono.launch.platform import KINDS

    value = _literal(text)
    if value is text:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
    kind = KINDS.get(name)
    return text if kind is not None and kind.fits(text) and not kind.fits(value) else value


def parse_console(text: str | None) -> Any:
    """Read `--console`; `Logs` checks it."""
    if text is None:
        return "auto"
    if all(part.strip().isdigit() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    return text

"""Messages of the library in the words of the command line: `--ranks 2` instead of `ranks=2`."""

from __future__ import annotations

import re

_OPTIONS = {
    "on": "--on",
    "device": "--on",
    "ranks": "--ranks",
    "rank": "--rank",
    "nodes": "--nodes",
    "n_nodes": "--nodes",
    "n_gpus_per_node": "--gpus",
    "partition": "--partition",
    "timeout_s": "--timeout-s",
    "max_restarts": "--max-restarts",
    "logs": "--logs",
    "console": "--console",
}
_VALUE = r"""(?:"[^"]*"|'[^']*'|\{[^}]*\}|\[[^\]]*\]|[\w./-]+)"""
_CALL = re.compile(r"unisono\.run\(\.\.\., (.*?)\)(?=$| )")
_MADE = re.compile(r"^(?:Platform|Logs)\((.*)\)(?=$| with )")
_WRAPPED = re.compile(r"(?:\bunisono\.)?\b(?:Platform|Logs)\((--[^()]*)\)")
_OF_A_SCRIPT = "Traceback (most recent call last)"
_PAIR = re.compile(rf"(?<![\w.\[{{\"'])([a-z_]+)=({_VALUE})")


def as_typed(message: str, command: str = "run") -> str:
    """Return a message with what was asked, and its hints, as they are typed in a shell.

    `command` is the one that was typed; others than `run` check places and ranks as it does.

    Example:
        >>> as_typed("unisono.run(..., ranks=0)")
        'unisono run --ranks 0'
    """
    first, *rest = message.split("\n")
    if _OF_A_SCRIPT in message:  # what the script did is told in its own words
        return "\n".join([first, *(_pairs(x) if x.startswith("HINT:") else x for x in rest)])
    lines = [_asked(first, command)]
    lines += [_pairs(line) if line.lstrip().startswith("HINT:") else line for line in rest]
    return "\n".join(lines)


def _asked(line: str, command: str) -> str:
    if (call := _CALL.search(line)) is not None:
        return f"{line[: call.start()]}unisono {command} {_pairs(call[1])}{line[call.end() :]}"
    if (made := _MADE.search(line)) is not None:
        return f"{_pairs(made[1])}{line[made.end() :]}"
    return line


def _pairs(text: str) -> str:
    text = text.replace("a longer timeout_s", "a longer --timeout-s")
    text = _WRAPPED.sub(r"\1", _PAIR.sub(_option, text))
    return re.sub(r", (?=--)", " ", text)


def _option(pair: re.Match[str]) -> str:
    from unisono.launch.platform import FIELDS, OLD_NAMES

    name, value = pair[1], pair[2]
    plain = value[1:-1] if value[0] in "\"'" else f"'{value}'" if value[0] in "{[" else value
    if name in _OPTIONS:
        return f"{_OPTIONS[name]} {plain.strip(chr(39))}"
    if name in FIELDS or name in OLD_NAMES:
        return f"--set {name}={plain}"
    return pair[0]

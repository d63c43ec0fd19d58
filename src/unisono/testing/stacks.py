"""Stacks that `faulthandler` wrote, made readable: source lines added, the bench's frames left out.

`faulthandler` answers even when a rank sits in C code or holds the interpreter lock, but prints the
innermost frame first and no source; here they are turned into the form of a traceback.
"""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass, field

from unisono.testing.tracebacks import is_bench_file

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])? ")

_WATCHDOG = "unisono/comm/watchdog.py"
"""The thread with which ranks watch each other; it always waits."""


def readable_stacks(text: str) -> str:
    """Turn the output of `faulthandler` into tracebacks, most recent call last, main thread first.

    >>> print(
    ...     readable_stacks('  File "a.py", line 2 in g' + chr(10) + '  File "a.py", line 7 in f')
    ... )
      File "a.py", line 7, in f
      File "a.py", line 2, in g
    """
    sections: list[_Section] = [_Section("")]
    for line in text.splitlines():
        frame = _FRAME.match(line)
        thread = _THREAD.match(line)
        if frame is not None:
            sections[-1].add(frame["file"], int(frame["line"]), frame["name"])
        elif thread is not None:
            sections.append(_Section.of_thread(line, thread["name"]))
        elif line.strip():
            sections[-1].title = f"{sections[-1].title}\n{line}".strip()
    sections.sort(key=lambda section: section.title.startswith("in thread"))
    return "\n".join(section.text for section in sections if section.text)


@dataclass
class _Section:
    """The stack of one thread, innermost frame first, or lines that belong to none."""

    title: str
    frames: list[str] = field(default_factory=list)
    is_ours: bool = False

    @classmethod
    def of_thread(cls, line: str, name: str | None) -> _Section:
        main = line.startswith("Current")
        where = "the main thread" if main else f"thread {name or '(unnamed)'}"
        return cls(f"in {where} (most recent call last):")

    def add(self, file: str, line: int, name: str) -> None:
        self.is_ours |= file.endswith(_WATCHDOG)
        if not _is_bench(file):
            self.frames.append(_with_source(file, line, name))

    @property
    def text(self) -> str:
        return "" if self.is_ours else "\n".join([self.title, *reversed(self.frames)]).lstrip("\n")


def _is_bench(filename: str) -> bool:
    return is_bench_file(filename) or filename == "<string>"


def _with_source(filename: str, number: int, name: str) -> str:
    source = linecache.getline(filename, number).strip()
    text = f'  File "{filename}", line {number}, in {name}'
    return f"{text}\n    {source}" if source else text

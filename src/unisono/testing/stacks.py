"""Stacks that `faulthandler` wrote, made readable: source lines added, the bench's frames left out.

`faulthandler` answers even when a rank sits in C code or holds the interpreter lock, but prints the
innermost frame first and no source; here they are turned into the form of a traceback.
"""

from __future__ import annotations

import linecache
import re

from unisono.testing.tracebacks import is_bench_file

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])? ")


def readable_stacks(text: str) -> str:
    """Turn the output of `faulthandler` into tracebacks, most recent call last.

    >>> print(
    ...     readable_stacks('  File "a.py", line 2 in g' + chr(10) + '  File "a.py", line 7 in f')
    ... )
      File "a.py", line 7, in f
      File "a.py", line 2, in g
    """
    lines: list[str] = []
    frames: list[str] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        thread = _THREAD.match(line)
        if frame is not None:
            if not _is_bench(frame["file"]):
                frames.append(_with_source(frame["file"], int(frame["line"]), frame["name"]))
            continue
        lines += reversed(frames)
        frames = []
        if thread is not None:
            main = line.startswith("Current")
            where = "the main thread" if main else f"thread {thread['name'] or '(unnamed)'}"
            lines.append(f"in {where} (most recent call last):")
        elif line.strip():
            lines.append(line)
    lines += reversed(frames)
    return "\n".join(lines)


def _is_bench(filename: str) -> bool:
    return is_bench_file(filename) or filename == "<string>"


def _with_source(filename: str, number: int, name: str) -> str:
    source = linecache.getline(filename, number).strip()
    text = f'  File "{filename}", line {number}, in {name}'
    return f"{text}\n    {source}" if source else text

"""What a rank prints, also kept in a file, however the rank was started."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


class _Tee:
    """A text stream that passes everything on and keeps a copy."""

    def __init__(self, stream: TextIO, fd: int) -> None:
        self._stream = stream
        self._fd = fd

    def write(self, text: str) -> int:
        """Pass `text` on; a full disk must not break the program that prints."""
        with suppress(OSError):
            os.write(self._fd, text.encode(errors="backslashreplace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # not there yet, as while it is unpickled
            raise AttributeError(name)
        return getattr(self._stream, name)


class OutputCopy:
    """Copies `sys.stdout` and `sys.stderr` to a file until closed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._before = sys.stdout, sys.stderr
        self._mine = tuple(_Tee(stream, self._fd) for stream in self._before)
        sys.stdout, sys.stderr = self._mine

    def write(self, text: str) -> None:
        """Put a line into the file alone."""
        with suppress(OSError):
            os.write(self._fd, text.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Put the streams back, unless somebody has put others in their place."""
        for name, mine, before in zip(("stdout", "stderr"), self._mine, self._before, strict=True):
            if getattr(sys, name) is mine:
                setattr(sys, name, before)
        os.close(self._fd)

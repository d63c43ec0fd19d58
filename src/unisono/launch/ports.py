"""Who listens at a port of this host, as far as the kernel tells us."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"


def owner_of_port(port: int) -> str:
    """Return who listens at `port`, as `python (process 12)`; "" if nobody can tell."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(fd) in links for fd in (process / "fd").iterdir()):  # noqa: PTH115
                name = (process / "comm").read_text().strip()
                return f"{name} (process {process.name})"
    return "a process of another user"


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return found

"""Which host this process runs on, as other processes can compare it."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from pathlib import Path


def host_id() -> str:
    """Return a name that is equal exactly for processes of one running host.

    `UNISONO_HOST_ID` replaces it, to rehearse several hosts on one.
    """
    return os.environ.get("UNISONO_HOST_ID") or _actual_host_id()


@lru_cache(maxsize=1)
def _actual_host_id() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()}/{boot}"
    except OSError:
        return socket.gethostname()

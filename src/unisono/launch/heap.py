"""The heap of a rank: what one step frees is kept for the next.

glibc hands memory back to the system when much of it lies free at the end of the heap. A training
loop asks for it again at once, and the system clears every page of it: that can take as long as the
step itself.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 1 << 30
"""Free memory at the end of the heap that a rank keeps."""
LARGEST_ON_HEAP = 32 << 20
"""Larger blocks come from the system and go back to it; glibc allows no more."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_OF_THE_USER = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
)


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; return whether it does.

    Only with glibc, and only where its own variables say nothing else.
    """
    if sys.platform != "linux" or _has_user_settings():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    # Either setting ends glibc's own adjustment of both, so both are set.
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_ON_HEAP)) and bool(
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
    )


def _has_user_settings() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc" in tunables or any(name in os.environ for name in _OF_THE_USER)

"""The compiled core `unisono._core`, or why it is not there, and the memory that ranks share.

A shared segment is an anonymous memory file, which the peers open through `/proc`. It leaves no
trace in the file system.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import secrets
import sys
from dataclasses import dataclass
from typing import Any

from unisono.errors import UnisonoError

VERSION = 9
"""That of the core's layout and calls; `src/core/segment.hpp` has the same."""
_NONCE_BYTES = 16
"""A segment starts with a random word, so that no rank takes another file for it."""
_MB = 1 << 20


@functools.cache
def _loaded() -> tuple[Any, str]:
    if sys.platform != "linux":
        return None, f"the compiled core runs on Linux, not on {sys.platform}"
    try:
        module = importlib.import_module("unisono._core")
    except ImportError as error:
        return None, (
            f"the compiled core is not there ({error}); with a C++ compiler (apt install g++), "
            "install unisono again"
        )
    if module.VERSION != VERSION:  # of an editable install whose sources have moved on
        return None, (
            f"the compiled core has version {module.VERSION}, {VERSION} is needed; build it again: "
            "pip install -e . --no-deps"
        )
    return module, ""


def unavailable() -> str | None:
    """Return why there is no compiled core, None if there is one."""
    if os.environ.get("UNISONO_CORE", "") == "0":
        return "UNISONO_CORE=0 switches the compiled core off"
    module, reason = _loaded()
    return None if module is not None else reason


def load() -> Any:
    """Return the module.

    Raises:
        UnisonoError: the core cannot be used; says why.
    """
    if (reason := unavailable()) is not None:
        raise UnisonoError(reason)
    return _loaded()[0]


@dataclass(frozen=True)
class SegmentTicket:
    """What a peer needs to find a segment; travels through the group's store as text."""

    pid: int
    fd: int
    size: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.pid} {self.fd} {self.size} {self.nonce}"

    @staticmethod
    def parse(text: str) -> SegmentTicket:
        """Read what `str` wrote."""
        pid, fd, size, nonce = text.split(" ")
        return SegmentTicket(int(pid), int(fd), int(size), nonce)


class SharedSegment:
    """Shared memory, mapped into this process.

    Attributes:
        memory: all its bytes; unmapped when nothing refers to them any more.
        address: where they begin in this process.
        ticket: how peers find it, until `seal`.
    """

    def __init__(self, fd: int, ticket: SegmentTicket) -> None:
        self.memory: Any = load().map(fd, ticket.size)
        self.address: int = self.memory.address
        self.ticket = ticket
        self._fd = fd

    @classmethod
    def create(cls, size: int) -> SharedSegment:
        """Make a segment of zeros, which has no memory yet: see `reserve`."""
        fd, nonce = _anonymous(), secrets.token_bytes(_NONCE_BYTES)
        try:
            os.ftruncate(fd, size)
            os.pwrite(fd, nonce, 0)
            return cls(fd, SegmentTicket(os.getpid(), fd, size, nonce.hex()))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, ticket: SegmentTicket) -> SharedSegment:
        """Map the segment another process made.

        Raises:
            OSError: it cannot be reached from here, or is not what the ticket says.
        """
        fd = os.open(f"/proc/{ticket.pid}/fd/{ticket.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            is_right = os.fstat(fd).st_size == ticket.size
            if not is_right or os.pread(fd, _NONCE_BYTES, 0).hex() != ticket.nonce:
                raise OSError(errno.ESTALE, "another file stands where the segment should be")
            return cls(fd, ticket)
        except BaseException:
            os.close(fd)
            raise

    def reserve(self, offset: int, nbytes: int, purpose: str) -> None:
        """Give a part of the segment memory, near the core that runs this process.

        So each rank takes what it will use itself, and a full host is an error here instead of a
        SIGBUS later.

        Raises:
            UnisonoError: there is not enough shared memory; says how much is needed.
        """
        try:
            os.posix_fallocate(self._fd, offset, nbytes)
            load().populate(self.address + offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
                raise
            raise UnisonoError.because(
                f"{purpose}: {nbytes / _MB:.1f} MB of shared memory",
                f"the system refuses it ({os.strerror(error.errno or 0)})",
                None,
                "UNISONO_SHM_SLOT_KB=64 needs less, backend='gloo' none; "
                "in a container, a larger memory limit",
            ) from error

    def seal(self) -> None:
        """Make the segment unreachable for newcomers; call it when all peers have mapped it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _anonymous() -> int:
    return os.memfd_create("unisono", os.MFD_CLOEXEC)

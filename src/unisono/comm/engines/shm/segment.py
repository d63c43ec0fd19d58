"""A piece of memory shared by processes of one host, which leaves no trace in the file system.

On Linux an anonymous memory file, opened by the peers through `/proc`; where that is refused, a
named one with an unpredictable name that is unlinked as soon as all ranks have mapped it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.comm.engines.shm import core
from unisono.errors import UnisonoError
from unisono.processes import pid_namespace, process_start

try:
    import _posixshmem
except ImportError:  # a Python built without named shared memory
    _posixshmem = None

KINDS: tuple[str, ...] = ("memfd", "named")
"""Ways to make a segment, the preferred first."""

NONCE_BYTES = 16
"""A segment starts with a random word, so that no rank takes another file for it."""

_DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"unisono-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}")
_MB = 1 << 20


@dataclass(frozen=True)
class SegmentTicket:
    """What a peer needs to find a segment; travels through the group's store as text."""

    kind: str
    where: str
    size: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.kind} {self.where} {self.size} {self.nonce}"

    @staticmethod
    def parse(text: str) -> SegmentTicket:
        """Read what `str` wrote."""
        kind, where, size, nonce = text.split(" ")
        return SegmentTicket(kind, where, int(size), nonce)


class SharedSegment:
    """Shared memory, mapped into this process.

    Attributes:
        memory: all its bytes; unmapped when nothing refers to them any more.
        address: where they begin in this process.
        ticket: how peers find it, until `seal`.
    """

    def __init__(self, memory: Any, ticket: SegmentTicket, fd: int) -> None:
        self.memory = memory
        self.address: int = memory.address
        self.ticket = ticket
        self._fd = fd

    @classmethod
    def create(cls, size: int, *, kind: str = KINDS[0]) -> SharedSegment:
        """Make a segment of zeros, which has no memory yet: see `reserve`.

        Raises:
            OSError: this way of making segments is not to be had here.
        """
        fd, where = _anonymous() if kind == "memfd" else _named()
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            os.ftruncate(fd, size)
            os.pwrite(fd, nonce, 0)
            memory = core.load().map(fd, size)
        except BaseException:
            os.close(fd)
            if kind == "named":
                _unlink(where)
            raise
        return cls(memory, SegmentTicket(kind, where, size, nonce.hex()), fd)

    @classmethod
    def open(cls, ticket: SegmentTicket) -> SharedSegment:
        """Map the segment another process made.

        Raises:
            OSError: it cannot be reached from here, or is not what the ticket says.
        """
        if ticket.kind == "memfd":
            pid, number = ticket.where.split(":")
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        else:
            fd = _shm_open(ticket.where, os.O_RDWR)
        try:
            if os.fstat(fd).st_size != ticket.size:
                raise OSError(errno.ESTALE, "another file stands where the segment should be")
            if os.pread(fd, NONCE_BYTES, 0).hex() != ticket.nonce:
                raise OSError(errno.ESTALE, "another segment stands where this one should be")
            return cls(core.load().map(fd, ticket.size), ticket, fd)
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
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, offset, nbytes)
            core.load().populate(self.address + offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
                raise
            raise UnisonoError.because(
                f"{purpose}: {nbytes / _MB:.1f} MB of shared memory",
                f"the system refuses it ({os.strerror(error.errno or 0)}); "
                f"{_room(self.ticket.kind)}",
                None,
                "UNISONO_SHM_SLOT_KB=64 needs less, backend='gloo' none; "
                "in a container, a larger --shm-size or memory limit",
            ) from error

    def seal(self) -> None:
        """Make the segment unreachable for newcomers; call it when all peers have mapped it.

        Whoever opened it gives its descriptor back with this, too.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self.ticket.kind == "named":
                _unlink(self.ticket.where)  # the first rank does; the others find it gone


def _anonymous() -> tuple[int, str]:
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "no anonymous memory files on this system")
    fd = os.memfd_create("unisono", os.MFD_CLOEXEC)
    return fd, f"{os.getpid()}:{fd}"


def _named() -> tuple[int, str]:
    sweep()
    owner = f"{os.getuid()}-{pid_namespace()}-{os.getpid()}-{process_start(os.getpid()) or 0}"
    name = f"/unisono-{owner}-{secrets.token_hex(8)}"
    if sys.platform == "darwin":  # at most 31 characters there, and no directory to sweep
        name = f"/unisono-{secrets.token_hex(8)}"
    return _shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL), name


def _shm_open(name: str, flags: int) -> int:
    """Open named shared memory, close-on-exec and without following links (libc sees to both)."""
    if _posixshmem is None:
        raise OSError(errno.ENOSYS, "this Python has no named shared memory")
    return _posixshmem.shm_open(name, flags, mode=0o600)


def _unlink(name: str) -> None:
    if _posixshmem is not None:
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(name)


def _room(kind: str) -> str:
    if kind == "named" and _DIRECTORY.is_dir():
        return f"{_DIRECTORY} has {shutil.disk_usage(_DIRECTORY).free / _MB:.1f} MB free"
    return "segments come out of main memory"


def sweep() -> list[str]:
    """Remove named segments whose owner died before it could unlink them; return their names."""
    if not _DIRECTORY.is_dir():
        return []
    swept: list[str] = []
    for path in _DIRECTORY.glob("unisono-*"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        uid, namespace, pid, started = (int(part) for part in match.groups())
        if uid != os.getuid() or namespace != pid_namespace():
            continue
        if process_start(pid) != started:
            _unlink(f"/{path.name}")
            swept.append(path.name)
    return swept

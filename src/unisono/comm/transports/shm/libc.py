"""The few libc calls of the shared-memory transport, typed once.

`memmove`, `sched_yield` and the futex calls free the GIL while they run. Functions that can fail
raise `OSError` with the system's words.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import weakref

_FAST = ctypes.CDLL(None)
_CHECKED = ctypes.CDLL(None, use_errno=True)

_PROT_READ_WRITE = 1 | 2
_MAP_SHARED = 1
_MADV_POPULATE_WRITE = 23
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_ALL_WAITERS = 2**31 - 1

SEM_BYTES = 64
"""Room for one semaphore: `sem_t` is 32 bytes or less on every Linux, rounded to a cache line."""

memmove = _FAST.memmove
memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
memmove.restype = None

sched_yield = _FAST.sched_yield
sched_yield.argtypes = []

_mmap = _CHECKED.mmap
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_mmap.restype = ctypes.c_void_p
_munmap = _CHECKED.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _CHECKED.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_syscall = _FAST.syscall
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]
_futex_number = _FUTEX_NUMBER.get(platform.machine()) if sys.platform == "linux" else None

sem_init = _CHECKED.sem_init
sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
sem_post = _FAST.sem_post
sem_post.argtypes = [ctypes.c_void_p]
sem_trywait = _FAST.sem_trywait
sem_trywait.argtypes = [ctypes.c_void_p]
_sem_getvalue = _FAST.sem_getvalue
_sem_getvalue.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_sem_timedwait = getattr(_FAST, "sem_timedwait", None)
if _sem_timedwait is not None:
    _sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]


class Timespec(ctypes.Structure):
    """Seconds and nanoseconds as the kernel wants them."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    def set(self, seconds: float) -> None:
        """Fill from a number of seconds."""
        self.seconds = int(seconds)
        self.nanoseconds = int((seconds - int(seconds)) * 1e9)


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def map_shared(fd: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Map `size` bytes of `fd` and return them; unmapped when the last view on them dies.

    Unlike `mmap.mmap` this keeps no duplicate of the file descriptor.
    """
    address = _mmap(None, size, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _failure(f"mmap of {size} bytes")
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at interpreter exit: tensors may still look at it then, and the system unmaps anyway.
    weakref.finalize(memory, _munmap, address, size).atexit = False
    return memory


def populate(address: int, size: int) -> bool:
    """Give every page of the range memory now.

    Returns:
        False where the kernel does not know how (before Linux 5.14).

    Raises:
        OSError: there is not enough memory; without this call, touching a page would be SIGBUS.
    """
    if sys.platform != "linux":
        return False
    page = os.sysconf("SC_PAGESIZE")
    begin = address // page * page
    if _madvise(begin, size + address - begin, _MADV_POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() == 22:  # EINVAL: unknown advice
        return False
    raise _failure(f"{size} bytes of shared memory")


def has_futex() -> bool:
    """Whether sleeping on a word of shared memory is possible here."""
    return _futex_number is not None


def futex_wait(address: int, expected: int, timeout: Timespec) -> None:
    """Sleep while the 32-bit word at `address` is `expected`, at most for `timeout`."""
    _syscall(
        _futex_number,
        address,
        _FUTEX_WAIT,
        expected & 0xFFFFFFFF,
        ctypes.addressof(timeout),
        None,
        0,
    )


def futex_wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`."""
    _syscall(_futex_number, address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)


def has_semaphores() -> bool:
    """Whether semaphores can live in shared memory here (not on macOS)."""
    return sys.platform == "linux" and _sem_timedwait is not None


def sem_wait_until(address: int, until: Timespec) -> bool:
    """Wait for the semaphore until the given wall-clock time; return whether it was taken."""
    if _sem_timedwait is None:
        raise OSError("no semaphores in shared memory on this system")
    return _sem_timedwait(address, ctypes.addressof(until)) == 0


def sem_value(address: int) -> int:
    """Return how often the semaphore can be taken without waiting."""
    value = ctypes.c_int()
    _sem_getvalue(address, ctypes.addressof(value))
    return value.value

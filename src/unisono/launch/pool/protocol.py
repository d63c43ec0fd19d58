"""What launcher and rank say to each other: the job, messages of the rank, orders of the launcher.

The job is in a file that all ranks read. A rank answers with pickled records on its own pipe;
orders come as one JSON object a line. Both pipes are inherited by exactly one process, so only our
own children are ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import secrets
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from unisono.launch.pool.payload import ROOM, Parcel

if TYPE_CHECKING:
    from unisono.launch.calling import Convention
    from unisono.launch.platform import Platform
    from unisono.launch.pool.surroundings import Surroundings

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 20
_NOTICE_S = 0.1
_sending = threading.RLock()
"""Messages of several threads of a rank do not mix."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of a run are told."""

    argv: list[str]
    """The launcher's `sys.argv`."""
    call: Parcel
    """Function and arguments; empty while the job is on its way, for they travel beside it."""
    convention: Convention
    """How to call it."""
    platform: Platform
    """What was asked for."""
    setting: Surroundings
    """The launcher's surroundings."""
    upon_finish: bytes | None = None
    """Function, pickled, that rank 0 calls when all have returned; else the launcher calls it."""
    is_script: bool = False
    """Whether the function is a whole script, which may initialise torch.distributed by itself."""
    secret: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)
    """With it ranks sign what they leave each other (`comm/seal.py`)."""


def payload_file(job: Job) -> int:
    """Return a descriptor, good as long as the job, of a nameless file with all it tells ranks.

    A file and not a pipe: all ranks read the same one, and none can keep the launcher waiting. It
    begins with the place of what comes after the call: our search path, and the rest of the job.
    """
    fd, end = job.call.file()
    search_path = b"\0".join(map(os.fsencode, sys.path))
    body = pickle.dumps(replace(job, call=Parcel(b"")), protocol=pickle.HIGHEST_PROTOCOL)
    os.pwrite(fd, end.to_bytes(8, "little"), 0)
    os.pwrite(fd, len(search_path).to_bytes(8, "little") + search_path + body, end)
    os.ftruncate(fd, end + 8 + len(search_path) + len(body))
    return fd


def read_payload(payload_fd: int) -> tuple[list[str], Job]:
    """Return the launcher's search path and the job, whose call is not unpickled yet."""
    end = int.from_bytes(os.pread(payload_fd, 8, 0), "little")
    length = int.from_bytes(os.pread(payload_fd, 8, end), "little")
    search_path = os.fsdecode(os.pread(payload_fd, length, end + 8)).split("\0")
    skip, size = end + 8 + length, os.fstat(payload_fd).st_size
    job: Job = pickle.loads(os.pread(payload_fd, size - skip, skip))
    return search_path, replace(job, call=Parcel(fd=payload_fd, offset=ROOM, is_owner=True))


def replace_search_path(path: Path, search_path: Sequence[str]) -> None:
    """Have ranks that read the payload in `path` look for modules in these directories."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        end = int.from_bytes(os.pread(fd, 8, 0), "little")
        length = int.from_bytes(os.pread(fd, 8, end), "little")
        body = os.pread(fd, os.fstat(fd).st_size, end + 8 + length)
        packed = b"\0".join(map(os.fsencode, search_path))
        os.pwrite(fd, len(packed).to_bytes(8, "little") + packed + body, end)
        os.ftruncate(fd, end + 8 + len(packed) + len(body))
    finally:
        os.close(fd)


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The rank runs, and answers the stack signal from now on."""

    host: str
    """Name of its host."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Rank 0 hosts the store here."""

    addr: str
    """Numeric address."""
    port: int
    """Port that the system gave it."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The rank is in its world and about to call the function."""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The function returned."""

    value: bytes | None
    """What it returned, as the bytes of a parcel; None if they are in the rank's result file."""
    wall_s: float
    """Seconds it took."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The function, or the start of the rank, raised."""

    summary: str
    """Type and text of the exception in one line."""
    traceback: str
    """Formatted traceback of the rank, without our own frames."""
    pickled: bytes | None
    """The exception itself, if it survives pickling."""
    is_consequence: bool
    """Whether it only says that another rank went away or did not come."""
    exit_code: int | None = None
    """Code of a `SystemExit`."""
    site: str = ""
    """Innermost line of the user's code, as `file.py:12 in step`."""
    is_mismatch: bool = False
    """Whether it says that ranks make different calls: each of them is one half of the reason."""
    lost: str = ""
    """What to try, where the rank is gone and who looked after it says so in its stead."""


@dataclass(frozen=True, kw_only=True)
class Requeued:
    """The function has saved what it needs and asks for another attempt."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where the rank stands among collectives; the answer to a question of the launcher."""

    call: str
    """Its latest collective, and whether that is over."""
    group: str
    """Group of that call, as all its ranks name it."""
    number: int
    """How many calls this rank has made in it."""


@dataclass(frozen=True, kw_only=True)
class Lingering:
    """The rank leaves although threads of the function, no daemons, still run."""

    threads: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True, kw_only=True)
class Finishing:
    """The rank is about to leave, but first finishes what must not be lost, such as a save."""

    seconds: float
    """Longest time it takes for that."""


@dataclass(frozen=True, kw_only=True)
class Preempt:
    """The function asks for a stop signal, to rehearse one."""

    rank: int
    """Who shall get it."""


Message = (
    Hello
    | Address
    | Ready
    | Returned
    | Failed
    | Requeued
    | Standing
    | Lingering
    | Finishing
    | Preempt
)


def _unlock_after_fork() -> None:
    global _sending
    _sending = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_unlock_after_fork)


def send_message(fd: int, message: object) -> None:
    """Write one message; blocks until the launcher has taken it."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    with _sending:
        for part in (_LENGTH.pack(len(body)), body):
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]


def receive_message(fd: int) -> Any:
    """Wait for one message; None when no more can come."""
    reader = MessageReader()
    while data := os.read(fd, reader.missing()):
        if messages := reader.feed(data):
            return messages[0]
    return None


class MessageReader:
    """Puts messages together from whatever pieces a pipe delivers."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def missing(self) -> int:
        """Return how many bytes the next message lacks, as far as that is known."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        return _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0] - len(self._buffer)

    def feed(self, data: bytes) -> list[Any]:
        """Take `data`; return the messages complete by now."""
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[_LENGTH.size : end].tobytes()))
            del self._buffer[:end]
        return messages


def read_available(fd: int) -> bytes | None:
    """Read from a descriptor that does not block: b"" at the end, None if nothing has come."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Stopped(BaseException):
    """Raised in the rank's main thread when the launcher stops it, so `finally` blocks run."""


class Lifeline:
    """The rank's end of the pipe for orders; its closing means that the launcher is gone.

    A thread reads it from the first moment, so that a rank whose launcher was killed ends itself
    and everything it started, also while its main thread waits in a collective.
    """

    def __init__(
        self,
        control_fd: int,
        on_request: Callable[[], None],
        on_question: Callable[[], None] = lambda: None,
        on_interrupt: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._fd = control_fd
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stop_ordered = threading.Event()
        self._leaving = False
        self._on_request = on_request
        self._on_question = on_question
        self._on_interrupt = on_interrupt
        self._taken: set[signal.Signals] = set()
        threading.Thread(target=self._read_orders, name="unisono-lifeline", daemon=True).start()
        self.take(("SIGTERM",))

    def take(self, signals: Sequence[str]) -> None:
        """Treat these signals as a request to stop, too."""
        for name in signals:
            signal.signal(signal.Signals[name], self._on_term)
            self._taken.add(signal.Signals[name])

    def part_from_children(self, drop: Callable[[], None]) -> None:
        """Have processes forked from this rank (workers of a pool or a loader) begin as plain ones.

        With the rank's handlers they could not be ended by TERM; with its pipes they would hold up
        the news of its end. `drop` lets go of what else belongs to the rank, in the forked process.
        """
        masks: dict[int, set[int]] = {}

        def hold() -> None:
            # A signal that comes before the child has its own handlers would be lost.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, self._taken)
            masks[threading.get_ident()] = before

        def release() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

        def begin_anew() -> None:
            for number in self._taken:
                if signal.getsignal(number) == self._on_term:  # else the user has set another
                    signal.signal(number, signal.SIG_DFL)
            drop_descriptor(self._fd)
            drop()
            release()

        os.register_at_fork(before=hold, after_in_parent=release, after_in_child=begin_anew)

    def wait_for(self, key: str, *, timeout_s: float) -> Any:
        """Return the value of the next order that has `key`; raise `queue.Empty` after a while."""
        give_up = time.monotonic() + timeout_s
        while True:
            order = self._orders.get(timeout=max(0.0, give_up - time.monotonic()))
            if key in order:
                return order[key]

    def leave(self) -> None:
        """From now on a stop is no news: the rank is leaving by itself."""
        self._leaving = True

    def _read_orders(self) -> None:
        with os.fdopen(self._fd, "rb") as pipe:
            for line in pipe:
                order = json.loads(line)
                if order.get("stop"):
                    self._stop_ordered.set()
                elif order.get("where"):
                    self._on_question()
                    continue
                elif order.get("interrupt"):
                    self._on_interrupt(float(order["interrupt"]))
                    continue
                self._orders.put(order)
        if not self._leaving:
            kill_own_group()
        self._orders.put({"stop": True})

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        """Raise `Stopped` if the launcher asked for the end; else note that somebody wants it.

        Whoever sends TERM to a rank (a scheduler, `simulate_preemption`) gives it time to save.
        """
        if self._leaving:
            return
        if self._stop_ordered.wait(_NOTICE_S):
            raise Stopped
        self._on_request()


def drop_descriptor(fd: int) -> None:
    """Let go of a pipe of the parent process; the number stays taken, for whoever closes it."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd, inheritable=False)
        os.close(null)


def kill_own_group() -> None:
    """Kill this process and all of its process group, which is ours alone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

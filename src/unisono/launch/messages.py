"""What a rank tells its launcher, and the frames in which it travels.

Rank to launcher: pickled records on the rank's own pipe. Launcher to rank: one JSON object a line.
Both pipes are inherited by exactly one process, so only our own children are ever unpickled.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import threading
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("<Q")
_sending = threading.RLock()
"""Messages of several threads of a rank do not mix."""


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
    Standing
    | Hello
    | Address
    | Ready
    | Returned
    | Failed
    | Requeued
    | Lingering
    | Finishing
    | Preempt
)


def _unlock_after_fork() -> None:
    global _sending
    _sending = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_unlock_after_fork)


def send_message(fd: int, message: Message) -> None:
    """Write one message; blocks until the launcher has taken it."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    with _sending:
        for part in (_LENGTH.pack(len(body)), body):
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]


class MessageReader:
    """Puts messages together from whatever pieces a pipe delivers."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take `data`; return the messages complete by now."""
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[_LENGTH.size : end].tobytes()))
            del self._buffer[:end]
        return messages


def send_order(fd: int, **order: Any) -> None:
    """Write one order to a rank. An order is short, so the pipe takes it whole."""
    os.write(fd, json.dumps(order).encode() + b"\n")

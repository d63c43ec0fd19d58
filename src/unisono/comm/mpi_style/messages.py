"""Messages between pairs of ranks, with MPI's verbs.

Ranks that MPI joins use MPI itself (`mpi_messages.py`). Elsewhere messages are those of the
`Communicator`, which name their source and tag and have the length that the receiver expects.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.comm import groups
from unisono.comm.communicator import Communicator
from unisono.comm.groups import GroupEntry
from unisono.comm.mpi_style.requests import Request, Status, drive
from unisono.comm.perform import Pending
from unisono.errors import MeshError, UnisonoError

_FIRST_TAG = 1 << 21
_TAGS = 1 << 16
_CONTEXTS = 1 << 12
"""Tags of the communicator from `_FIRST_TAG` on belong to these messages: `_TAGS` in a context."""
_LEAVE_S = 5.0


class Messages(ABC):
    """Messages of this rank in one communicator and one context (`Dup` and `Split` make new ones).

    Args:
        comm: the group.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @abstractmethod
    def send(
        self, x: Tensor, dst: int, tag: int, *, is_sync: bool, is_copied: bool, timeout_s: float
    ) -> Request:
        """Send a contiguous tensor to `dst`.

        Args:
            x: the values, on the device of the communicator.
            dst: rank of the communicator, possibly this one.
            tag: the user's tag.
            is_sync: complete when the message has been received.
            is_copied: whether the caller may change `x` at once.
            timeout_s: deadline of waits.
        """

    @abstractmethod
    def send_object(self, obj: Any, dst: int, tag: int, *, timeout_s: float) -> None:
        """Send a picklable object to `dst`."""

    @abstractmethod
    def receive(
        self, buffer: Tensor | None, source: int | None, tag: int | None, *, timeout_s: float
    ) -> Request:
        """Receive the next message into `buffer`; None: a Python object, or any source or tag."""

    def refuse_any_tag(self, verb: str) -> None:  # noqa: B027
        """Raise where messages are received with a tag that is named."""

    @property
    @abstractmethod
    def has_unsent(self) -> bool:
        """Whether something that was sent may not have arrived yet."""


class PlainMessages(Messages):
    """Messages over any backend: `send` and `recv` of the communicator.

    Args:
        comm: the group.
        context: number of the context in it, the same on all ranks.
    """

    def __init__(self, comm: Communicator, context: int) -> None:
        super().__init__(comm)
        self._first_tag = _FIRST_TAG + context % _CONTEXTS * _TAGS
        self._unsent: deque[Pending[None]] = deque()
        self._to_itself: dict[int, deque[Any]] = {}

    @property
    def has_unsent(self) -> bool:
        """See `Messages`."""
        while self._unsent and self._unsent[0].done():
            self._unsent.popleft()
        return bool(self._unsent)

    def send(
        self, x: Tensor, dst: int, tag: int, *, is_sync: bool, is_copied: bool, timeout_s: float
    ) -> Request:
        """See `Messages`."""
        if is_sync:
            raise MeshError.because(
                f"a synchronous send to rank {dst} over {self._comm.backend}",
                "torch.distributed does not tell when a message has been received",
                None,
                f"Send, or an answer of rank {dst}; {_ON_MPI}",
            )
        if is_copied or dst == self._comm.rank:
            x = x.clone()
        if dst == self._comm.rank:
            self._to_itself.setdefault(tag, deque()).append(x)
            return Request.done()
        pending = self._start(x, dst, tag, timeout_s)
        return Request.done() if is_copied else Request(pending.done, pending.wait)

    def send_object(self, obj: Any, dst: int, tag: int, *, timeout_s: float) -> None:
        """See `Messages`."""
        raw = self._comm._pickled(obj)
        if dst == self._comm.rank:
            self._to_itself.setdefault(tag, deque()).append(raw)
            return
        self._start(torch.tensor([raw.numel()]), dst, tag, timeout_s)
        self._start(raw, dst, tag, timeout_s)

    def _start(self, x: Tensor, dst: int, tag: int, timeout_s: float) -> Pending[None]:
        x = x.to(self._comm.device)
        pending = self._comm.start.send(x, dst, self._wire_tag(tag), timeout_s=timeout_s)
        if not self.has_unsent or not pending.done():
            self._unsent.append(pending)
        return pending

    def receive(
        self, buffer: Tensor | None, source: int | None, tag: int | None, *, timeout_s: float
    ) -> Request:
        """See `Messages`."""
        comm = self._comm
        if source is None:
            raise MeshError.because(
                f"a receive from any source over {comm.backend}",
                "a message of torch.distributed is received from a rank that is named",
                None,
                f"Recv(buf, source=0); {_ON_MPI}",
            )
        tag = 0 if tag is None else tag
        if source == comm.rank:
            return self._receive_own(buffer, tag)

        def describe(status: Status) -> None:
            status.source, status.tag = source, tag
            status.count = -1 if buffer is None else buffer.numel()

        wire_tag, device = self._wire_tag(tag), comm.device
        if buffer is not None:
            work = buffer
            if buffer.device.type != device.type:
                work = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            pending = comm.start.recv_(work, source, wire_tag, timeout_s=timeout_s)

            def fill() -> None:
                pending.wait()
                if work is not buffer:
                    buffer.copy_(work)

            return Request(pending.done, fill, describe)
        steps = _ObjectReceive(comm, source, wire_tag, timeout_s)
        return Request(steps.is_ready, steps.finish, describe)

    def refuse_any_tag(self, verb: str) -> None:
        """See `Messages`."""
        raise MeshError.because(
            f"{verb} with any tag over {self._comm.backend}",
            "a message of torch.distributed is received with the tag with which it was sent",
            None,
            f"{verb}(..., tag=0); {_ON_MPI}",
        )

    def _receive_own(self, buffer: Tensor | None, tag: int) -> Request:
        box = self._to_itself.setdefault(tag, deque())

        def finish() -> Any:
            if not box:
                raise MeshError.because(
                    f"a receive of rank {self._comm.rank} from itself",
                    "nothing was sent, and while it waits nothing will be",
                    None,
                    "send first, or Irecv, send, Wait",
                )
            x = box.popleft()
            if buffer is None:
                return self._comm._unpickled(x, [x.numel()], self._comm.rank)[0]
            buffer.copy_(x.view(buffer.shape))
            return None

        return Request(lambda: bool(box), finish)

    def _wire_tag(self, tag: int) -> int:
        if tag >= _TAGS:
            raise UnisonoError.because(
                f"a message with tag {tag} over {self._comm.backend}",
                f"messages have tags 0 to {_TAGS - 1}",
                f"{tag} > {_TAGS - 1}",
                "a smaller tag",
            )
        return self._first_tag + tag


class _ObjectReceive:
    """A Python object under way: its length comes first."""

    def __init__(self, comm: Communicator, source: int, tag: int, timeout_s: float) -> None:
        self._comm, self._source, self._tag, self._timeout_s = comm, source, tag, timeout_s
        self._length = comm.start.recv(((1,), torch.int64), source, tag, timeout_s=timeout_s)
        self._body: Pending[Tensor] | None = None

    def is_ready(self) -> bool:
        """Whether all of it has come."""
        return self._length.done() and self._bytes().done()

    def finish(self) -> Any:
        """Wait for the object and return it."""
        raw = self._bytes().wait().cpu()
        return self._comm._unpickled(raw, [raw.numel()], self._source)[0]

    def _bytes(self) -> Pending[Tensor]:
        if self._body is None:
            like = ((int(self._length.wait()),), torch.uint8)
            start = self._comm.start.recv
            self._body = start(like, self._source, self._tag, timeout_s=self._timeout_s)
        return self._body


_ON_MPI = "with MPI, under mpiexec: MPICommunication(mpi4py.MPI.COMM_WORLD)"

_boxes: weakref.WeakKeyDictionary[GroupEntry, dict[int, Messages]] = weakref.WeakKeyDictionary()


def messages_of(comm: Communicator, context: int, make: Callable[[], Messages]) -> Messages:
    """Return this rank's messages in one context of a communicator, made when first asked for."""
    if not _boxes:
        # Registered when the world is up, so that it runs before the world is closed.
        atexit.unregister(_flush)
        atexit.register(_flush)
    boxes = _boxes.setdefault(comm._entry, {})
    if context not in boxes:
        boxes[context] = make()
    return boxes[context]


def drop_messages(comm: Communicator, context: int) -> None:
    """Let go of a context; what was sent in it still arrives."""
    _boxes.get(comm._entry, {}).pop(context, None)


@groups.when_forgotten
def _drop_ended() -> None:
    """Let go of messages of groups that have ended: each holds the group it is kept for."""
    for entry in [entry for entry in _boxes if not entry.is_alive()]:
        _boxes.pop(entry)


def _flush() -> None:
    """Let what was sent arrive before this process ends, unless it ends with an exception."""
    if getattr(sys, "last_value", None) is None:
        boxes = [box for made in _boxes.values() for box in made.values()]
        drive(lambda: not any(box.has_unsent for box in boxes), _LEAVE_S)

"""Messages of MPI's style: their `Request` and `Status`, and how they travel without MPI.

Ranks that MPI joins use MPI itself (`mpi_messages.py`). Elsewhere messages are those of the
`Communicator`, which name their source and tag and have the length that the receiver expects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from unisono.comm.communicator import Communicator
from unisono.comm.mpi_style.constants import ANY_SOURCE, ANY_TAG
from unisono.comm.perform import Pending
from unisono.errors import MeshError, UnisonoError

_FIRST_TAG = 1 << 21
_TAGS = 1 << 16
_CONTEXTS = 1 << 12
"""Tags of the communicator from `_FIRST_TAG` on belong to these messages: `_TAGS` in a context."""
_ON_MPI = "with MPI, under mpiexec: MPICommunication(mpi4py.MPI.COMM_WORLD)"


class Status:
    """What is known of a received message: filled by `Recv`, `recv`, and waits of their requests.

    Attributes:
        source: rank that sent the message.
        tag: its tag.
        count: its number of elements (of bytes, for a Python object).
    """

    def __init__(self) -> None:
        self.source = ANY_SOURCE
        self.tag = ANY_TAG
        self.count = 0

    def Get_source(self) -> int:
        """Return the rank that sent the message."""
        return self.source

    def Get_tag(self) -> int:
        """Return the tag of the message."""
        return self.tag

    def Get_count(self) -> int:
        """Return the number of elements of the message."""
        return self.count

    def __repr__(self) -> str:
        return f"Status(source={self.source}, tag={self.tag}, count={self.count})"


class Request:
    """A verb under way; every way to complete it writes the result into the caller's buffer.

    Args:
        is_ready: whether `finish` would not block.
        finish: waits for the end and returns what `Wait` returns; called until it has.
        describe: fills the status of a receive.
    """

    def __init__(
        self,
        is_ready: Callable[[], bool],
        finish: Callable[[], Any] | None,
        describe: Callable[[Status], None] = lambda _: None,
    ) -> None:
        self._is_ready = is_ready
        self._finish = finish
        self._describe = describe
        self._value: Any = None

    @classmethod
    def done(cls) -> Request:
        """Return a request that is complete."""
        return cls(lambda: True, None)

    def Wait(self, status: Status | None = None) -> Any:
        """Return when the verb is complete; a request of `irecv` returns the object."""
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None  # unless it has raised, as it then does again
        if status is not None:
            self._describe(status)
        return self._value

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the verb is complete, without waiting."""
        if self._finish is not None and not self._is_ready():
            return False
        self.Wait(status)
        return True

    @staticmethod
    def Waitall(requests: Iterable[Request]) -> list[Any]:
        """Wait for all `requests`; returns what each of them returns."""
        return [request.Wait() for request in requests]

    wait = Wait
    test = Test
    waitall = Waitall


class Messages(ABC):
    """Messages of this rank in one context of a communicator (`Dup` and `Split` make new ones)."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @abstractmethod
    def send(self, x: Tensor, dst: int, tag: int, *, is_sync: bool = False) -> Request:
        """Send a contiguous tensor, which must not change before the request is complete.

        Args:
            x: the values, on the device of the communicator.
            dst: rank of the communicator.
            tag: the user's tag.
            is_sync: complete when the message has been received.
        """

    @abstractmethod
    def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """Send a picklable object to `dst`."""

    @abstractmethod
    def receive(self, buffer: Tensor | None, source: int | None, tag: int | None) -> Request:
        """Receive the next message into `buffer`; None: a Python object.

        A `source` of None is any; a `tag` of None was left out, `ANY_TAG` is any.
        """


class PlainMessages(Messages):
    """Messages over any backend: `send` and `recv` of the communicator.

    Args:
        comm: the group.
        context: number of the context in it, the same on all ranks.
    """

    def __init__(self, comm: Communicator, context: int) -> None:
        super().__init__(comm)
        self._first_tag = _FIRST_TAG + context % _CONTEXTS * _TAGS

    def send(self, x: Tensor, dst: int, tag: int, *, is_sync: bool = False) -> Request:
        """See `Messages`."""
        if is_sync:
            raise MeshError.because(
                f"a synchronous send to rank {dst} over {self.comm.backend}",
                "torch.distributed does not tell when a message has been received",
                None,
                f"Send, or an answer of rank {dst}; {_ON_MPI}",
            )
        pending = self.comm.start.send(x, dst, self._wire_tag(tag))
        return Request(pending.done, pending.wait)

    def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """See `Messages`; the length goes first."""
        start, wire_tag = self.comm.start, self._wire_tag(tag)
        raw = self.comm._pickled(obj).to(self.comm.device)
        start.send(torch.tensor([raw.numel()], device=raw.device), dst, wire_tag)
        start.send(raw, dst, wire_tag)

    def receive(self, buffer: Tensor | None, source: int | None, tag: int | None) -> Request:
        """See `Messages`."""
        if source is None or tag == ANY_TAG:
            raise MeshError.because(
                f"a receive from any source or with any tag over {self.comm.backend}",
                "torch.distributed receives what a named rank has sent with a named tag",
                None,
                f"Recv(buf, source=0, tag=0); {_ON_MPI}",
            )
        tag = tag or 0
        if buffer is None:
            return self._receive_object(source, tag)
        work = buffer
        if buffer.device.type != self.comm.device.type:
            work = torch.empty_like(buffer, device=self.comm.device)
        pending = self.comm.start.recv_(work, source, self._wire_tag(tag))

        def finish() -> None:
            pending.wait()
            if work is not buffer:
                buffer.copy_(work)

        def describe(status: Status) -> None:
            status.source, status.tag, status.count = source, tag, buffer.numel()

        return Request(pending.done, finish, describe)

    def _receive_object(self, source: int, tag: int) -> Request:
        comm, wire_tag = self.comm, self._wire_tag(tag)
        length = comm.start.recv(((1,), torch.int64), source, wire_tag)
        body: list[Pending[Tensor]] = []

        def start() -> Pending[Tensor]:
            if not body:
                like = ((int(length.wait()),), torch.uint8)
                body.append(comm.start.recv(like, source, wire_tag))
            return body[0]

        def finish() -> Any:
            raw = start().wait().cpu()
            return comm._unpickled(raw, [raw.numel()], source)[0]

        def describe(status: Status) -> None:
            status.source, status.tag, status.count = source, tag, int(length.wait())

        return Request(lambda: length.done() and start().done(), finish, describe)

    def _wire_tag(self, tag: int) -> int:
        if tag >= _TAGS:
            raise UnisonoError.because(
                f"a message with tag {tag} over {self.comm.backend}",
                f"messages have tags 0 to {_TAGS - 1}",
                f"{tag} > {_TAGS - 1}",
                "a smaller tag",
            )
        return self._first_tag + tag

"""Messages over MPI itself: any source, any tag, and lengths that the receiver need not know.

MPI is never asked to block: every wait is a loop with a deadline, and a rank that waits for
anything moves its messages on. Each message begins with its tag, dtype and length, so that tags
above MPI's limit can be folded and a buffer of the wrong kind is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.comm import call as calls
from unisono.comm.arguments import bytes_of, is_dense
from unisono.comm.call import Call
from unisono.comm.communicator import Communicator
from unisono.comm.engines.mpi.library import Threads, load
from unisono.comm.health import failures
from unisono.comm.mpi_style.messages import Messages
from unisono.comm.mpi_style.requests import Request, Status, drive, look_after
from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES
from unisono.errors import PartitionError, UnisonoError

_HEAD = struct.Struct("<3q")
_OBJECT = -1
_CHUNK_BYTES = 1 << 28
"""Longest stretch of memory that one part of a datatype describes; MPI counts in 32 bits."""


class Receive:
    """A receive of this rank: what it takes, and what came.

    Args:
        source: rank it takes messages from; None for any.
        tag: tag it takes; None for any.
        buffer: tensor of any strides that is filled from its start; None for a Python object.
    """

    def __init__(self, source: int | None, tag: int | None, buffer: Tensor | None) -> None:
        self.source, self.tag, self.buffer = source, tag, buffer
        self.request: Any = None
        """MPI's, once a message has been found for it."""
        self.is_done = False
        self.values: Tensor | None = None
        """The bytes of the message."""
        self.head = bytearray(_HEAD.size)
        self.sender = -1

    def room(self, nbytes: int) -> Tensor:
        """Return memory for the values: the buffer itself, where they fit into it as they are."""
        x = self.buffer
        if x is not None and x.device.type == "cpu" and is_dense(x) and nbytes <= x.nbytes:
            return bytes_of(x)[:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def describe(self, status: Status) -> None:
        """Write into `status` what came."""
        if self.is_done:
            tag, number, nbytes = _HEAD.unpack(self.head)
            size = 1 if number == _OBJECT else DTYPES[number].itemsize
            status.source, status.tag, status.count = self.sender, tag, nbytes // size

    def delivered(self, comm: Communicator) -> Any:
        """Return the object received, None for a buffer; raise if the message does not fit."""
        values = self.values
        if (error := self._refusal()) is not None or values is None:
            raise error or UnisonoError("this message has been delivered already")
        if self.buffer is None:
            return comm._unpickled(values, [values.numel()], self.sender)[0]
        if values.numel() and values.data_ptr() != self.buffer.data_ptr():
            _fill(self.buffer, values)
        return None

    def _refusal(self) -> UnisonoError | None:
        tag, number, nbytes = _HEAD.unpack(self.head)
        message = f"a message of rank {self.sender} with tag {tag}"
        if self.tag not in (None, tag):
            return PartitionError.because(
                f"a receive with tag {self.tag}",
                f"{message}, which this MPI cannot tell from it: larger tags are folded",
                None,
                "tags below mpi4py.MPI.COMM_WORLD.Get_attr(mpi4py.MPI.TAG_UB)",
            )
        is_object = number == _OBJECT
        if (self.buffer is None) != is_object:
            right, wrong = ("recv()", "Recv") if is_object else ("Recv(buf)", "recv")
            return PartitionError.because(
                f"{wrong} of {message}",
                "a Python object was sent" if is_object else "a buffer was sent",
                None,
                f"{right}: send belongs to recv, Send to Recv",
            )
        if self.buffer is None:
            return None
        if DTYPES[number] != self.buffer.dtype:
            return PartitionError.because(
                f"Recv of {message}",
                f"{DTYPES[number]} was sent, the buffer holds {self.buffer.dtype}",
                None,
                "one dtype",
            )
        length, room = nbytes // self.buffer.itemsize, self.buffer.numel()
        if length > room:
            return PartitionError.because(
                f"Recv of {message}",
                f"{length} elements were sent, the buffer holds {room}",
                f"{length} > {room}",
                "a larger buffer; Status.Get_count() tells how much came",
            )
        return None


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Write values, given as bytes, to the first elements of `buffer`."""
    typed = values.to(buffer.device).view(buffer.dtype)
    if typed.numel() == buffer.numel():
        buffer.copy_(typed.view(buffer.shape))
        return
    whole = buffer.reshape(-1)
    whole[: typed.numel()] = typed
    if whole.data_ptr() != buffer.data_ptr():
        buffer.copy_(whole.view(buffer.shape))


class MpiMessages(Messages):
    """Messages over a communicator of mpi4py that carries nothing else.

    Args:
        comm: the group.
        wire: the communicator, with the same ranks.
    """

    def __init__(self, comm: Communicator, wire: Any) -> None:
        super().__init__(comm)
        self._mpi = load()
        self._lock = Threads(self._mpi).lock
        self._wire = wire
        self._tags = int(self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)) + 1
        self._sent: list[tuple[Any, object]] = []
        """Requests of MPI, each with the memory that it needs."""
        self._expected: list[Receive] = []
        """Receives without a message, in the order of their calls."""
        self._coming: list[Receive] = []

    @property
    def has_unsent(self) -> bool:
        """See `Messages`."""
        return bool(self._sent)

    def send(
        self, x: Tensor, dst: int, tag: int, *, is_sync: bool, is_copied: bool, timeout_s: float
    ) -> Request:
        """See `Messages`."""
        on_host = x.cpu()
        if is_copied and on_host is x:
            on_host = x.clone()
        number = DTYPE_NUMBERS[x.dtype]
        request = self._start(bytes_of(on_host), number, dst, tag, is_sync=is_sync)
        if is_copied and not is_sync:
            return Request.done()

        def is_sent() -> bool:
            return all(other is not request for other, _ in self._sent)

        call = Call("send", self._comm.name, str(self._comm.group_name), sends_to=(dst,))
        return Request(is_sent, lambda: self._until(is_sent, call, timeout_s))

    def send_object(self, obj: Any, dst: int, tag: int, *, timeout_s: float) -> None:  # noqa: ARG002
        """See `Messages`."""
        self._start(self._comm._pickled(obj), _OBJECT, dst, tag, is_sync=False)

    def _start(self, values: Tensor, number: int, dst: int, tag: int, *, is_sync: bool) -> Any:
        head = bytearray(_HEAD.pack(tag, number, values.numel()))
        start = self._wire.Issend if is_sync else self._wire.Isend
        with self._lock:
            kind = self._kind(head, values)
            request = start([self._mpi.BOTTOM, 1, kind], dst, tag % self._tags)
            kind.Free()  # MPI keeps it until the message has gone
        self._sent.append((request, (head, values)))
        self.step()
        return request

    def receive(
        self, buffer: Tensor | None, source: int | None, tag: int | None, *, timeout_s: float
    ) -> Request:
        """See `Messages`."""
        comm, receive = self._comm, Receive(source, tag, buffer)
        self._expected.append(receive)
        self.step()
        others = tuple(r for r in range(comm.size) if r != comm.rank and source in (None, r))
        call = Call("recv", comm.name, str(comm.group_name), receives_from=others)

        def finish() -> Any:
            try:
                self._until(lambda: receive.is_done, call, timeout_s)
            finally:
                if receive in self._expected:
                    self._expected.remove(receive)  # given up: it must not take a later message
            return receive.delivered(comm)

        return Request(lambda: receive.is_done, finish, receive.describe)

    def step(self) -> bool:
        """Move messages on; return whether one has moved."""
        before = len(self._sent) + len(self._expected) + len(self._coming)
        with self._lock:
            self._sent = [pair for pair in self._sent if not pair[0].Test()]
            for receive in list(self._expected):
                if receive in self._expected:
                    self._match(receive)
            for receive in self._coming:
                receive.is_done = receive.request.Test()
        self._coming = [receive for receive in self._coming if not receive.is_done]
        after = len(self._sent) + len(self._expected) + len(self._coming)
        look_after(self, after > 0)
        return after != before

    def _match(self, receive: Receive) -> None:
        """Begin to receive a message that `receive` takes, if there is one."""
        mpi, status = self._mpi, self._mpi.Status()
        source = mpi.ANY_SOURCE if receive.source is None else receive.source
        tag = mpi.ANY_TAG if receive.tag is None else receive.tag % self._tags
        message = self._wire.Improbe(source, tag, status)
        if message is None:
            return
        sender, sent_tag = status.Get_source(), status.Get_tag()
        # An earlier receive that takes it, too, has looked before the message was there.
        first = next(
            other
            for other in self._expected
            if other.source in (None, sender)
            and (other.tag is None or other.tag % self._tags == sent_tag)
        )
        first.sender = sender
        first.values = first.room(status.Get_elements(mpi.BYTE) - _HEAD.size)
        kind = self._kind(first.head, first.values)
        first.request = message.Irecv([mpi.BOTTOM, 1, kind])
        kind.Free()
        self._expected.remove(first)
        self._coming.append(first)

    def _kind(self, head: bytearray, values: Tensor) -> Any:
        """Return a datatype of MPI that holds the addresses of a head and its values."""
        lengths, places = [_HEAD.size], [self._mpi.Get_address(head)]
        for begin in range(0, values.numel(), _CHUNK_BYTES):
            lengths.append(min(_CHUNK_BYTES, values.numel() - begin))
            places.append(values.data_ptr() + begin)
        return self._mpi.BYTE.Create_hindexed(lengths, places).Commit()

    def _until(self, is_ready: Callable[[], bool], call: Call, timeout_s: float) -> None:
        if is_ready():
            return
        calls.latest_call = call
        drive(is_ready, timeout_s)
        if not is_ready():
            raise failures.timed_out(call, self._comm.ranks, timeout_s)
        call.done = True

"""A receive that was posted: what it takes, and what it does with a message."""

from __future__ import annotations

import pickle
from typing import Any

from torch import Tensor

from unisono.comm.blocks import bytes_of
from unisono.comm.mpi_style.envelope import Envelope
from unisono.comm.mpi_style.status import Status
from unisono.errors import PartitionError, UnisonoError


class Receive:
    """A receive of this rank.

    Args:
        source: rank it takes messages from; None for any.
        tag: tag it takes; None for any.
        buffer: tensor of any strides that is filled from its start; None for a Python object.
    """

    def __init__(self, source: int | None, tag: int | None, buffer: Tensor | None) -> None:
        self.source = source
        self.tag = tag
        self.buffer = buffer
        self.is_done = False
        self._taken: Envelope | None = None
        self._value: Any = None
        self._error: UnisonoError | None = None

    def takes(self, envelope: Envelope) -> bool:
        """Whether this receive is for such a message."""
        return self.source in (None, envelope.source) and self.tag in (None, envelope.tag)

    def room_for(self, envelope: Envelope, device_type: str) -> Tensor | None:
        """Return the bytes of the buffer into which the values can go directly, if they can."""
        x = self.buffer
        if x is None or self._refusal(envelope) is not None:
            return None
        if not x.is_contiguous() or x.device.type != device_type or x.is_conj() or x.is_neg():
            return None
        return bytes_of(x)[: envelope.nbytes]

    def take(self, envelope: Envelope) -> None:
        """Complete with a message; values that are not in the buffer yet are copied to it."""
        self._taken = envelope
        self._error = self._refusal(envelope)
        values, envelope.values = envelope.values, None
        if self._error is None and values is not None:
            if self.buffer is None:
                # The mailbox takes only what a rank of this world has signed.
                self._value = pickle.loads(values.cpu().numpy().tobytes())
            elif envelope.nbytes:
                _fill(self.buffer, values)
        self.is_done = True

    def finish(self) -> Any:
        """Return the object received, None for a buffer; raises if the message did not fit."""
        if self._error is not None:
            raise self._error
        return self._value

    def describe(self, status: Status) -> None:
        """Write into `status` what came."""
        if self._taken is not None:
            status.source, status.tag = self._taken.source, self._taken.tag
            dtype = self._taken.dtype
            status.count = self._taken.nbytes // (1 if dtype is None else dtype.itemsize)

    def _refusal(self, envelope: Envelope) -> UnisonoError | None:
        message = f"a message of rank {envelope.source} with tag {envelope.tag}"
        if (self.buffer is None) != (envelope.dtype is None):
            sent, wanted = ("recv()", "Recv") if envelope.dtype is None else ("Recv(buf)", "recv")
            return PartitionError.because(
                f"{wanted} of {message}",
                "a Python object was sent" if envelope.dtype is None else "a buffer was sent",
                None,
                f"{sent}: send belongs to recv, Send to Recv",
            )
        if self.buffer is None or envelope.dtype is None:
            return None
        have, came = self.buffer.dtype, envelope.dtype
        if have != came:
            return PartitionError.because(
                f"Recv of {message}", f"{came} was sent, the buffer holds {have}", None, "one dtype"
            )
        room, length = self.buffer.numel(), envelope.nbytes // came.itemsize
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

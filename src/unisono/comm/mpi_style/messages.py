"""Messages between pairs of ranks with tags, any source, and lengths the receiver need not know.

torch.distributed can neither probe nor match tags by "any", so an envelope goes first, through the
world's store, into the receiver's inbox: all senders' envelopes, in one order. Short values travel
inside it. Long ones go over the group's own transport; the reader fetches them as soon as it meets
the envelope and acknowledges, which tells the sender that its memory is free again.

Everybody who reaches the store could put an envelope there, and objects are unpickled: so envelopes
are signed, each for its place in the inbox, and hold the digest of an object that travels apart.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import pickle
import struct
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from unisono.comm import call as calls
from unisono.comm import groups, seal
from unisono.comm.arguments import DTYPE_NUMBERS, DTYPES, bytes_of, is_dense
from unisono.comm.call import Call
from unisono.comm.communicator import Communicator
from unisono.comm.groups import GroupEntry
from unisono.comm.health import failures
from unisono.comm.health.watchdog import seal_of, store_of
from unisono.comm.mpi_style.requests import Request, Status, drive, look_after
from unisono.comm.perform import Pending
from unisono.errors import MeshError, PartitionError, UnisonoError

INLINE_BYTES = 4096
"""Values up to this length travel inside the envelope."""
BUFFERED_BYTES = 256 * 1024 * 1024
"""`Send` keeps copies of at most so many bytes that nobody has received."""

_FIRST_TAG = 1 << 21
_TAGS = 1 << 16
_LEAVE_S = 5.0
_HEADER = struct.Struct("<4q4b32s")
_OBJECT = -1
_serials = itertools.count()


@dataclass(eq=False)
class Envelope:
    """A message, or the news that one was taken (an acknowledgement)."""

    source: int
    """Rank that sent it."""
    serial: int
    """Number that the sender gave it."""
    tag: int = 0
    """Tag given by the user."""
    nbytes: int = 0
    """Length of the values."""
    dtype: torch.dtype | None = None
    """Their dtype; None for a pickled object."""
    is_sync: bool = False
    """Whether the sender waits until somebody receives it, not merely until it has arrived."""
    is_apart: bool = False
    """Whether the values travel as a message of the transport."""
    is_ack: bool = False
    """Whether this acknowledges message `serial` of the reader."""
    values: Tensor | None = None
    """The values as flat bytes, when they are here."""
    digest: bytes = b""
    """SHA-256 of a pickled object whose bytes travel apart: only these are unpickled."""

    def pack(self) -> bytes:
        """Return header and inline values."""
        number = _OBJECT if self.dtype is None else DTYPE_NUMBERS[self.dtype]
        flags = (number, self.is_sync, self.is_apart, self.is_ack)
        header = _HEADER.pack(self.source, self.serial, self.tag, self.nbytes, *flags, self.digest)
        if self.is_apart or self.values is None:
            return header
        return header + self.values.cpu().numpy().tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Envelope:
        """Undo `pack`."""
        source, serial, tag, nbytes, number, *flags, digest = _HEADER.unpack_from(data)
        is_sync, is_apart, is_ack = map(bool, flags)
        dtype = None if number == _OBJECT else DTYPES[number]
        values = None
        if inline := bytearray(data[_HEADER.size :]):
            values = torch.frombuffer(inline, dtype=torch.uint8)
        elif not is_apart:
            values = torch.empty(0, dtype=torch.uint8)
        return cls(source, serial, tag, nbytes, dtype, is_sync, is_apart, is_ack, values, digest)


def digest_of(values: Tensor) -> bytes:
    """Return the digest of flat bytes."""
    return hashlib.sha256(values.cpu().numpy().tobytes()).digest()


class Receive:
    """A receive of this rank: what it takes, and what it does with a message.

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
        if x.device.type != device_type or not is_dense(x):
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


class _Sent(NamedTuple):
    """A message not acknowledged yet."""

    pending: Pending[None] | None
    nbytes: int
    """Bytes of a copy that is kept for it."""


class Mailbox:
    """Messages of this rank in one communicator and one context (`Dup` and `Split` make new ones).

    Args:
        comm: the group.
        context: number of the context in it, the same on all ranks.
    """

    def __init__(self, comm: Communicator, context: int) -> None:
        self._comm = comm
        self._store: Store | None = None
        self._place = f"unisono/mail/{comm.group_name}/{context}"
        if comm.size > 1:
            self._store = PrefixStore(self._place, store_of(str(comm.group_name)))
            self._seal = seal_of(str(comm.group_name))
        self._next = 1
        self._expected: list[Receive] = []
        self._arrived: list[Envelope] = []
        self._sent: dict[int, _Sent] = {}

    @property
    def has_unsent(self) -> bool:
        """Whether something that was sent has not been fetched yet."""
        return bool(self._sent)

    def send(
        self,
        x: Tensor,
        dtype: torch.dtype | None,
        dst: int,
        tag: int,
        *,
        is_sync: bool = False,
        is_copied: bool = True,
        timeout_s: float,
    ) -> Request:
        """Send flat bytes to `dst`.

        Args:
            x: contiguous bytes, on the device of the communicator.
            dtype: what they are; None for a pickled object.
            dst: rank of the communicator, possibly this one.
            tag: the user's tag.
            is_sync: complete when somebody receives it.
            is_copied: whether the caller may change `x` at once.
            timeout_s: deadline of waits; that of `comm` may be another one of the same group.
        """
        comm, serial = self._comm, next(_serials)
        is_apart = x.numel() > INLINE_BYTES and dst != comm.rank
        envelope = Envelope(comm.rank, serial, tag, x.numel(), dtype, is_sync, is_apart)
        if dtype is None and comm.size > 1:
            self._seal.check_alike(comm.ranks, timeout_s)
        if is_apart:
            envelope.digest = digest_of(x) if dtype is None else b""
            kept = x.clone() if is_copied else x
            pending = comm.start.send(kept, dst, _wire_tag(serial))
            self._sent[serial] = _Sent(pending, kept.numel() if is_copied else 0)
        else:
            envelope.values = x.clone() if dst == comm.rank else x
            if is_sync:
                self._sent[serial] = _Sent(None, 0)
        self._post(dst, envelope)
        self._attend()
        call = Call("send", comm.name, str(comm.group_name), sends_to=(dst,))

        def has_room() -> bool:
            return sum(sent.nbytes for sent in self._sent.values()) <= BUFFERED_BYTES

        self._until(has_room, call, timeout_s)
        if (is_copied and not is_sync) or serial not in self._sent:
            return Request.done()

        def is_taken() -> bool:
            return serial not in self._sent

        return Request(is_taken, lambda: self._until(is_taken, call, timeout_s))

    def receive(
        self, source: int | None, tag: int | None, buffer: Tensor | None, *, timeout_s: float
    ) -> Request:
        """Receive the next message from `source` with `tag` (None: any) into `buffer`."""
        comm, receive = self._comm, Receive(source, tag, buffer)
        if buffer is None and comm.size > 1:
            self._seal.check_alike(comm.ranks, timeout_s)
        envelope = next((one for one in self._arrived if receive.takes(one)), None)
        if envelope is not None:
            self._arrived.remove(envelope)
            self._hand_over(envelope, receive)
        else:
            self._expected.append(receive)
            self._attend()
        others = tuple(r for r in range(comm.size) if r != comm.rank and source in (None, r))
        call = Call("recv", comm.name, str(comm.group_name), receives_from=others)

        def finish() -> object:
            try:
                if not receive.is_done and not others:
                    raise MeshError.because(
                        f"a receive of rank {comm.rank} from itself",
                        "nothing was sent, and while it waits nothing will be",
                        None,
                        "send first, or Irecv, send, Wait",
                    )
                self._until(lambda: receive.is_done, call, timeout_s)
            finally:
                if not receive.is_done and receive in self._expected:
                    self._expected.remove(receive)  # given up: it must not take a later message
                    self._attend()
            return receive.finish()

        return Request(lambda: receive.is_done, finish, receive.describe)

    def step(self) -> bool:
        """Read one envelope of the inbox, if there is one."""
        if not self._comm._entry.is_alive():  # the world has ended
            look_after(self, False)
            return False
        if self._store is None:
            return False
        key = f"{self._comm.rank}/{self._next}"
        if not self._store.check([key]):
            return False
        data = self._seal.verified(bytes(self._store.get(key)), f"{self._place}/{key}")
        self._store.delete_key(key)
        self._next += 1
        if data is None:
            raise seal.refused(f"message {key.partition('/')[2]} for rank {self._comm.rank}")
        envelope = Envelope.unpack(data)
        if envelope.is_ack:
            self._acknowledged(envelope.serial)
        else:
            self._arrive(envelope)
        self._attend()
        return True

    def _until(self, is_ready: Callable[[], bool], call: Call, timeout_s: float) -> None:
        if is_ready():
            return
        calls.latest_call = call
        drive(is_ready, timeout_s)
        if not is_ready():
            raise failures.timed_out(call, self._comm.ranks, timeout_s)
        call.done = True

    def _attend(self) -> None:
        """Be looked after by every wait while messages are under way."""
        look_after(self, bool(self._expected or self._sent))

    def _post(self, dst: int, envelope: Envelope) -> None:
        if dst == self._comm.rank:
            self._arrive(envelope)
        elif self._store is not None:
            key = f"{dst}/{self._store.add(f'{dst}', 1)}"
            data = self._seal.sign(envelope.pack(), f"{self._place}/{key}")
            self._store.set(key, data)  # type: ignore[arg-type]

    def _arrive(self, envelope: Envelope) -> None:
        receive = next((one for one in self._expected if one.takes(envelope)), None)
        if envelope.is_apart:
            self._fetch(envelope, receive)
        if receive is None:
            self._arrived.append(envelope)
        else:
            self._expected.remove(receive)
            self._hand_over(envelope, receive)

    def _fetch(self, envelope: Envelope, receive: Receive | None) -> None:
        """Get values that travel apart: into the buffer of `receive` if they can go there."""
        device = self._comm.device
        where = None if receive is None else receive.room_for(envelope, device.type)
        if where is None:
            where = torch.empty(envelope.nbytes, dtype=torch.uint8, device=device)
            envelope.values = where
        self._comm.recv_(where, envelope.source, _wire_tag(envelope.serial))
        if envelope.dtype is None and digest_of(where) != envelope.digest:
            raise seal.refused(f"an object of rank {envelope.source} with tag {envelope.tag}")
        if not envelope.is_sync:
            self._acknowledge(envelope)

    def _hand_over(self, envelope: Envelope, receive: Receive) -> None:
        receive.take(envelope)
        if envelope.is_sync:
            self._acknowledge(envelope)

    def _acknowledge(self, envelope: Envelope) -> None:
        if envelope.source == self._comm.rank:
            self._acknowledged(envelope.serial)
        else:
            self._post(envelope.source, Envelope(self._comm.rank, envelope.serial, is_ack=True))

    def _acknowledged(self, serial: int) -> None:
        sent = self._sent.pop(serial, None)
        if sent is not None and sent.pending is not None:
            sent.pending.wait()


def _wire_tag(serial: int) -> int:
    return _FIRST_TAG + serial % _TAGS


_boxes: weakref.WeakKeyDictionary[GroupEntry, dict[int, Mailbox]] = weakref.WeakKeyDictionary()


def mailbox_of(comm: Communicator, context: int) -> Mailbox:
    """Return this rank's mailbox in one context of a communicator."""
    if not _boxes:
        # Registered when the world is up, so that it runs before the world is closed.
        atexit.unregister(_flush)
        atexit.register(_flush)
    boxes = _boxes.setdefault(comm._entry, {})
    if context not in boxes:
        boxes[context] = Mailbox(comm, context)
    return boxes[context]


def drop_mailbox(comm: Communicator, context: int) -> None:
    """Let go of a mailbox; what it has sent still arrives."""
    _boxes.get(comm._entry, {}).pop(context, None)


@groups.when_forgotten
def _drop_ended() -> None:
    """Let go of mailboxes of groups that have ended: each holds the group it is kept for."""
    for entry in [entry for entry in _boxes if not entry.is_alive()]:
        for box in _boxes.pop(entry).values():
            look_after(box, False)


def _flush() -> None:
    """Let what was sent arrive before this process ends, unless it ends with an exception."""
    if getattr(sys, "last_value", None) is None:
        boxes = [box for made in _boxes.values() for box in made.values()]
        drive(lambda: not any(box.has_unsent for box in boxes), _LEAVE_S)

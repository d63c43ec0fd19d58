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
import itertools
import sys
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from unisono.comm import call as calls
from unisono.comm import seal
from unisono.comm.call import Call
from unisono.comm.communicator import Communicator
from unisono.comm.health import failures
from unisono.comm.health.watchdog import store_of
from unisono.comm.mpi_style import progress
from unisono.comm.mpi_style.envelope import Envelope, digest_of
from unisono.comm.mpi_style.receive import Receive
from unisono.comm.mpi_style.request import Request
from unisono.comm.perform import Pending
from unisono.errors import MeshError

INLINE_BYTES = 4096
"""Values up to this length travel inside the envelope."""
BUFFERED_BYTES = 256 * 1024 * 1024
"""`Send` keeps copies of at most so many bytes that nobody has received."""

_FIRST_TAG = 1 << 21
_TAGS = 1 << 16
_LEAVE_S = 5.0
_serials = itertools.count()


@dataclass(eq=False)
class _Sent:
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
            self._seal = seal.of(str(comm.group_name))
        self._next = 1
        self._expected: list[Receive] = []
        self._arrived: list[Envelope] = []
        self._sent: dict[int, _Sent] = {}
        if not _boxes:
            # Registered when the world is up, so that it runs before the world is closed.
            atexit.unregister(_flush_all)
            atexit.register(_flush_all)
        _boxes.add(self)

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
            timeout_s: deadline of waits.
        """
        comm, serial = self._comm, next(_serials)
        is_apart = x.numel() > INLINE_BYTES and dst != comm.rank
        envelope = Envelope(comm.rank, serial, tag, x.numel(), dtype, is_sync, is_apart)
        if dtype is None and comm.size > 1:
            self._seal.check_alike(comm.ranks, timeout_s)
        if is_apart:
            envelope.digest = digest_of(x) if dtype is None else b""
            kept = x.clone() if is_copied else x
            wire_tag = _FIRST_TAG + serial % _TAGS
            pending = comm.start.send(kept, dst, wire_tag)
            self._sent[serial] = _Sent(pending, kept.numel() if is_copied else 0)
        else:
            envelope.values = x.clone() if dst == comm.rank else x
            if is_sync:
                self._sent[serial] = _Sent(None, 0)
        self._post(dst, envelope)
        self._note()
        call = Call("send", *self._where, sends_to=(dst,))
        self._until(lambda: self._kept_bytes() <= BUFFERED_BYTES, call, timeout_s)
        if (is_copied and not is_sync) or serial not in self._sent:
            return Request.done()

        def is_taken() -> bool:
            return serial not in self._sent

        return Request(is_taken, lambda: self._until(is_taken, call, timeout_s))

    def receive(
        self, source: int | None, tag: int | None, buffer: Tensor | None, *, timeout_s: float
    ) -> Request:
        """Receive the next message from `source` with `tag` (None: any) into `buffer`."""
        receive = Receive(source, tag, buffer)
        if buffer is None and self._comm.size > 1:
            self._seal.check_alike(self._comm.ranks, timeout_s)
        for envelope in self._arrived:
            if receive.takes(envelope):
                self._arrived.remove(envelope)
                self._hand_over(envelope, receive)
                break
        else:
            self._expected.append(receive)
            self._note()
        everybody = tuple(range(self._comm.size))
        others = tuple(r for r in everybody if r != self._comm.rank and source in (None, r))
        call = Call("recv", *self._where, receives_from=others)

        def finish() -> object:
            try:
                if not receive.is_done and not others:
                    raise MeshError.because(
                        f"a receive of rank {self._comm.rank} from itself",
                        "nothing was sent, and while it waits nothing will be",
                        None,
                        "send first, or Irecv, send, Wait",
                    )
                self._until(lambda: receive.is_done, call, timeout_s)
            finally:
                self._forget(receive)
            return receive.finish()

        return Request(lambda: receive.is_done, finish, receive.describe)

    def step(self) -> bool:
        """Read one envelope of the inbox, if there is one."""
        if not self._comm._entry.is_alive():  # the world has ended
            progress.attend(self, False)
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
        self._note()
        return True

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was sent has been fetched, or the deadline has passed."""
        progress.drive(lambda: not self._sent, timeout_s)

    def _forget(self, receive: Receive) -> None:
        """Take nothing for a receive that was given up."""
        if not receive.is_done:
            self._expected.remove(receive)
            self._note()

    def _kept_bytes(self) -> int:
        return sum(sent.nbytes for sent in self._sent.values())

    @property
    def _where(self) -> tuple[str, str, int]:
        return self._comm.name, str(self._comm.group_name), 0

    def _until(self, is_ready: progress.Check, call: Call, timeout_s: float) -> None:
        if is_ready():
            return
        calls.latest_call = call
        progress.drive(is_ready, timeout_s)
        if not is_ready():
            raise failures.timed_out(call, self._comm.ranks, timeout_s)
        call.done = True

    def _note(self) -> None:
        progress.attend(self, bool(self._expected or self._sent))

    def _post(self, dst: int, envelope: Envelope) -> None:
        if dst == self._comm.rank:
            self._arrive(envelope)
        elif self._store is not None:
            place = self._store.add(f"{dst}", 1)
            key = f"{dst}/{place}"
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
        room = None if receive is None else receive.room_for(envelope, device.type)
        where = room
        if where is None:
            where = torch.empty(envelope.nbytes, dtype=torch.uint8, device=device)
            envelope.values = where
        self._comm.recv_(where, envelope.source, _FIRST_TAG + envelope.serial % _TAGS)
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
            ack = Envelope(self._comm.rank, envelope.serial, is_ack=True)
            self._post(envelope.source, ack)

    def _acknowledged(self, serial: int) -> None:
        sent = self._sent.pop(serial, None)
        if sent is not None and sent.pending is not None:
            sent.pending.wait()


_boxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _flush_all() -> None:
    """Let what was sent arrive before this process ends, unless it ends with an exception."""
    if getattr(sys, "last_value", None) is None:
        for box in list(_boxes):
            if box._comm._entry.is_alive():
                box.flush(_LEAVE_S)

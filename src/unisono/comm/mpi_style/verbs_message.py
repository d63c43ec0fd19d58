"""Messages between two ranks: Send and its kinds, Recv, and their non-blocking twins.

`Send` copies the values and returns; `Isend` leaves them where they are until `Wait`. `Ssend` ends
when the receiver has the message. Messages of one sender arrive in the order of sending.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch
from torch import Tensor

from unisono.comm.arguments import check_rank
from unisono.comm.blocks import bytes_of, dense
from unisono.comm.mpi_style import constants
from unisono.comm.mpi_style.buffers import Buffer, as_tensor
from unisono.comm.mpi_style.constants import ANY_SOURCE, ANY_TAG
from unisono.comm.mpi_style.performing import Performer
from unisono.comm.mpi_style.request import Request
from unisono.comm.mpi_style.status import Status
from unisono.errors import PartitionError, an, explain


class MessageVerbs(Performer):
    """Messages. Not collective: called by the two ranks concerned."""

    def Send(self, buf: Buffer, dest: int, tag: int = 0) -> None:
        """Send a copy of `buf` to rank `dest`; returns at once, `buf` may be changed."""
        self._post(buf, dest, tag, "Send")

    def Bsend(self, buf: Buffer, dest: int, tag: int = 0) -> None:
        """Send a copy of `buf`: the same as `Send`."""
        self._post(buf, dest, tag, "Bsend")

    def Rsend(self, buf: Buffer, dest: int, tag: int = 0) -> None:
        """Send to a rank that waits for it: the same as `Send`."""
        self._post(buf, dest, tag, "Rsend")

    def Ssend(self, buf: Buffer, dest: int, tag: int = 0) -> None:
        """Send `buf` and return when rank `dest` has received it."""
        self._post(buf, dest, tag, "Ssend", is_sync=True, is_copied=False).Wait()

    def Isend(self, buf: Buffer, dest: int, tag: int = 0) -> Request:
        """Start to send `buf`, which must not change before the request is complete."""
        return self._post(buf, dest, tag, "Isend", is_copied=False)

    def Ibsend(self, buf: Buffer, dest: int, tag: int = 0) -> Request:
        """Send a copy of `buf`; the request is complete."""
        return self._post(buf, dest, tag, "Ibsend")

    def Irsend(self, buf: Buffer, dest: int, tag: int = 0) -> Request:
        """Start to send to a rank that waits for it: the same as `Isend`."""
        return self._post(buf, dest, tag, "Irsend", is_copied=False)

    def Issend(self, buf: Buffer, dest: int, tag: int = 0) -> Request:
        """Start `Ssend`: complete when rank `dest` has received the message."""
        return self._post(buf, dest, tag, "Issend", is_sync=True, is_copied=False)

    def Recv(
        self,
        buf: Buffer,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Fill `buf` with the next message of that source and tag.

        A shorter message fills the first elements; `status.Get_count()` tells how many.
        """
        self._expect(as_tensor(buf, "Recv", "buf"), source, tag, "Recv").Wait(status)

    def Irecv(self, buf: Buffer, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start `Recv`. Values above 4 KB are fetched by `Wait`, `Test` or another wait."""
        return self._expect(as_tensor(buf, "Irecv", "buf"), source, tag, "Irecv")

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send a picklable object to rank `dest`; returns at once."""
        self._post_object(obj, dest, tag, "send")

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send a picklable object; it was copied, so the request is complete."""
        self._post_object(obj, dest, tag, "isend")
        return Request.done()

    def recv(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Return the next object of that source and tag."""
        return self._expect(None, source, tag, "recv").Wait(status)

    def irecv(self, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start `recv`; `Wait` returns the object."""
        return self._expect(None, source, tag, "irecv")

    def _post(
        self,
        buf: Buffer,
        dest: int,
        tag: int,
        verb: str,
        *,
        is_sync: bool = False,
        is_copied: bool = True,
    ) -> Request:
        _check_tag(tag, verb)
        if not self._is_somebody(dest, verb, "dest"):
            return Request.done()
        x = as_tensor(buf, verb, "sendbuf")
        flat = bytes_of(dense(self._staged(x)))
        return self._mailbox.send(
            flat,
            x.dtype,
            dest,
            tag,
            is_sync=is_sync,
            is_copied=is_copied,
            timeout_s=self._comm.timeout_s,
        )

    def _post_object(self, obj: Any, dest: int, tag: int, verb: str) -> None:
        _check_tag(tag, verb)
        if self._is_somebody(dest, verb, "dest"):
            raw = torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)
            self._mailbox.send(self._staged(raw), None, dest, tag, timeout_s=self._comm.timeout_s)

    def _expect(self, buffer: Tensor | None, source: int, tag: int, verb: str) -> Request:
        wanted_tag = None if constants.is_any_tag(tag) else _check_tag(tag, verb)
        wanted_source = None if constants.is_any_source(source) else source
        if wanted_source is not None and not self._is_somebody(wanted_source, verb, "source"):
            return Request.done()
        return self._mailbox.receive(
            wanted_source, wanted_tag, buffer, timeout_s=self._comm.timeout_s
        )

    def _is_somebody(self, rank: int, verb: str, what: str) -> bool:
        """Check the other rank; False for `PROC_NULL`."""
        if isinstance(rank, int) and constants.is_nobody(rank):
            return False
        check_rank(rank, self._comm.size, what, verb)
        return True


def _check_tag(tag: int, verb: str) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise TypeError(explain(f"{verb}(tag={tag!r})", an(type(tag).__name__), None, "tag=0"))
    if tag < 0:
        raise PartitionError.because(
            f"{verb}(tag={tag})", None, f"{tag} < 0", "tag=0 or more; ANY_TAG only receives"
        )
    return tag

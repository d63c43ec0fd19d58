"""A message on its way: what is written on it, and its form in the store."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm.reductions import DTYPES

_HEADER = struct.Struct("<4q4b32s")
_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
_OBJECT = -1


@dataclass(eq=False)
class Envelope:
    """A message, or the word that one was taken (an acknowledgement)."""

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
        number = _OBJECT if self.dtype is None else _NUMBER[self.dtype]
        flags = (number, self.is_sync, self.is_apart, self.is_ack)
        who = (self.source, self.serial, self.tag, self.nbytes)
        header = _HEADER.pack(*who, *flags, self.digest)
        if self.is_apart or self.values is None:
            return header
        return header + self.values.cpu().numpy().tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Envelope:
        """Undo `pack`."""
        *who, number, is_sync, is_apart, is_ack, digest = _HEADER.unpack_from(data)
        source, serial, tag, nbytes = who
        inline = bytearray(data[_HEADER.size :])
        values = torch.frombuffer(inline, dtype=torch.uint8) if inline else None
        return cls(
            source,
            serial,
            tag,
            nbytes,
            None if number == _OBJECT else DTYPES[number],
            bool(is_sync),
            bool(is_apart),
            bool(is_ack),
            torch.empty(0, dtype=torch.uint8) if values is None and not is_apart else values,
            digest,
        )


def digest_of(values: Tensor) -> bytes:
    """Return the digest of flat bytes."""
    return hashlib.sha256(values.cpu().numpy().tobytes()).digest()

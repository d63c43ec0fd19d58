"""What is known of a message that was received."""

from __future__ import annotations

from unisono.comm.mpi_style.constants import ANY_SOURCE, ANY_TAG


class Status:
    """Filled by `Recv`, `recv` and by the waits of their requests.

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

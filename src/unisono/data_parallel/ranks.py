"""What `comm` may be in this package: anything that names ranks, resolved in one place."""

from __future__ import annotations

from unisono.comm import Communicator
from unisono.comm.mpi_style import get_comm
from unisono.errors import UnisonoError, explain
from unisono.expect import one_line

__all__ = ["communicator_of"]


def communicator_of(comm: object) -> Communicator:
    """Return the communicator that `comm` names; None is the world, or what `use_comm` set. Local.

    A `Communicator` is used as it is, so that a subclass keeps its own behaviour. Where a launcher
    started this process as a rank and nobody has joined its world yet, None joins it (collective).

    Raises:
        TypeError: it names no group of ranks.
    """
    if isinstance(comm, Communicator):
        return comm
    try:
        return Communicator.of(get_comm() if comm is None else comm)
    except UnisonoError as error:
        if isinstance(error, ValueError):
            raise
        raise TypeError(
            explain(
                f"comm={one_line(comm)}",
                f"{type(comm).__name__}, which names no group of ranks",
                None,
                "None, a Communicator, an MPICommunication or a ProcessGroup",
            )
        ) from None

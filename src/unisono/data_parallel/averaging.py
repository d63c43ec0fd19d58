"""How one bucket becomes its mean over ranks: plainly, as it is.

An averaging starts when a bucket is full and ends when somebody waits for it. Those that send less
than the bucket are in `compression.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.data_parallel.gradient_bucket import GradientBucket


class Handle(Protocol):
    """A bucket under way."""

    def proceed(self) -> None:
        """Start what comes after the first message; called on all ranks in the same order."""
        ...

    def wait(self) -> None:
        """Return when the bucket holds the mean, or raise. Local: starts no collective."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Done:
    """A bucket that holds the mean already."""

    def proceed(self) -> None:
        """See `Handle`: there is no second message."""

    def wait(self) -> None:
        """See `Handle`."""

    def done(self) -> bool:
        """See `Handle`."""
        return True


class Direct(Done):
    """One collective under way, perhaps on a copy that goes back to the bucket."""

    def __init__(
        self, pending: Pending[Tensor], wire: Tensor | None = None, flat: Tensor | None = None
    ) -> None:
        self._pending = pending
        self._wire = wire
        self._flat = flat

    def wait(self) -> None:
        """See `Handle`."""
        self._pending.wait()
        if self._wire is not None and self._flat is not None:
            self._flat.copy_(self._wire)

    def done(self) -> bool:
        """See `Handle`."""
        return self._pending.done()


class Averaging(ABC):
    """A way to average buckets.

    Attributes:
        eager: whether buckets start during backward, or all at its end.
        carries_flags: whether the flags at the end of a bucket travel with it.
    """

    eager: bool = True
    carries_flags: bool = True

    def factor(self, weight: float | None, size: int) -> float | None:
        """Return what the engine multiplies gradients with while filing them; None: nothing.

        Args:
            weight: weight of this rank's gradient in the mean; None: one of `size` equal ones.
            size: number of ranks.
        """
        return 1.0 / size if weight is None else weight

    @abstractmethod
    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle:
        """Begin to average `bucket`. Collective; buckets start in the same order on all ranks.

        Args:
            bucket: filled.
            comm: the ranks, on the bucket's device.
        """

    def end_step(self) -> None:  # noqa: B027
        """All buckets of a backward have started."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to go on exactly."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` gave."""


class OverNetwork(Averaging):
    """One sum a bucket, under way while backward goes on."""

    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle:
        """See `Averaging`."""
        return Direct(comm.start.all_reduce_(bucket.flat, "sum"))


class InSharedMemory(Averaging):
    """Ranks of one host reduce each other's buckets in place, at the end of backward.

    The reduction is work for the same cores that run backward, so there is nothing to gain by
    starting early: one meeting at the end beats several in between.
    """

    eager = False

    def __init__(self, blocking: bool) -> None:
        self._blocking = blocking

    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle:
        """See `Averaging`."""
        if self._blocking:
            comm.all_reduce_(bucket.flat, "sum")
            return Done()
        return Direct(comm.start.all_reduce_(bucket.flat, "sum"))

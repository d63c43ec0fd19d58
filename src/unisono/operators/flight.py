"""`Flight`: messages posted before it is known whether their values will be used."""

from __future__ import annotations

from torch import Tensor

from unisono.comm.perform import Pending


class Flight:
    """Messages between pairs of ranks, under way.

    Args:
        pending: what `Communicator.exchange` has started; None when there was nothing to start.
        landed: values by peer, of messages that arrived before.
    """

    __slots__ = ("_landed", "_pending")

    def __init__(
        self,
        pending: Pending[dict[int, Tensor]] | None = None,
        landed: dict[int, Tensor] | None = None,
    ) -> None:
        self._pending = pending
        self._landed = landed

    def take(self) -> dict[int, Tensor]:
        """Wait and return the tensor from each peer; they are handed over, not kept."""
        pending, landed = self._pending, self._landed
        self._pending = self._landed = None
        return pending.wait() if pending is not None else landed or {}

    def drop(self) -> None:
        """Let the messages arrive, so that every one has found its partner, and forget them."""
        self.take()

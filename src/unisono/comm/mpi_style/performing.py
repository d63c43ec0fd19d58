"""What all verbs share: the communicator underneath, and how a collective is made and awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.comm.communicator import Communicator
from unisono.comm.mpi_style import progress
from unisono.comm.mpi_style.mailbox import Mailbox
from unisono.comm.mpi_style.request import Request
from unisono.comm.perform import Pending

Start = Callable[[Any], Any]
"""Makes a verb of a `Communicator`, or of its `start`."""


class Performer:
    """Base of the verb classes."""

    @property
    def _comm(self) -> Communicator:
        raise AttributeError("_comm")

    @property
    def _mailbox(self) -> Mailbox:
        raise AttributeError("_mailbox")

    def _perform(self, start: Start, deliver: Callable[[Any], None], blocking: bool) -> Request:
        """Make a collective; complete it now, or hand out a request that does."""
        if blocking:
            deliver(self._result(start))
            return Request.done()
        return Request.of(start(self._comm.start), deliver, self._comm.timeout_s)

    def _result(self, start: Start) -> Any:
        """Make a collective and return its result, looking after messages meanwhile."""
        if not progress.is_needed():
            return start(self._comm)
        pending: Pending[Any] = start(self._comm.start)
        progress.drive(pending.done, self._comm.timeout_s)
        return pending.wait()

    def _agree(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the integers of all ranks; all bring equally many. Collective, blocking."""
        comm = self._comm
        mine = torch.tensor([list(values)], dtype=torch.int64, device=comm.device)
        sizes = [1] * comm.size
        whole: Tensor = self._result(lambda verbs: verbs.all_gather(mine, 0, sizes))
        return [tuple(row) for row in whole.tolist()]

    def _staged(self, x: Tensor) -> Tensor:
        """Return `x` on the device on which the group works; `x` itself where it is there."""
        device = self._comm.device
        return x if x.device.type == device.type else x.to(device)

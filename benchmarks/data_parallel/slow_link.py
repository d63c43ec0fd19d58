"""A slow link between two nodes on one machine: a delay on all that is reduced across it.

The same delay and the same count of bytes for our communicator and for torch's DDP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from unisono.comm import Communicator, Pending, StartedVerbs, world


class Link:
    """Counts what passes and tells when it arrives.

    Args:
        latency_s: time of a message without content.
        bytes_per_s: what the link carries; messages queue behind each other.
    """

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.bytes = 0
        self._free_at = 0.0

    def send(self, nbytes: int) -> float:
        """Take a message and return the time of its arrival."""
        self.bytes += nbytes
        self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.bytes_per_s
        return self._free_at + self.latency_s


link = Link(latency_s=0.04, bytes_per_s=25e6)
"""The link of this process."""


class SlowVerbs(StartedVerbs):
    """Started collectives whose results arrive over the link."""

    def all_reduce_(self, x: Tensor, op: str = "sum", *, timeout_s: float | None = None) -> Any:
        """See `Communicator`: a ring moves 2 (P - 1) / P of the tensor each way."""
        share = 2 * (self._comm.size - 1) / self._comm.size
        return Late(super().all_reduce_(x, op, timeout_s=timeout_s), share * x.nbytes)

    def all_to_all(self, x: Tensor, *sizes: Any, timeout_s: float | None = None) -> Any:
        """See `Communicator`: all but the own block travels."""
        share = (self._comm.size - 1) / self._comm.size
        return Late(super().all_to_all(x, *sizes, timeout_s=timeout_s), share * x.nbytes)

    def all_gather(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """See `Communicator`: the own block goes to all others."""
        share = self._comm.size - 1
        return Late(super().all_gather(x, *args, **options), share * x.nbytes)


class TwoNodes(Communicator):
    """Ranks of which each half is a node."""

    @property
    def start(self) -> StartedVerbs:
        """The verbs, over the link if ranks of both nodes take part."""
        return SlowVerbs(self) if crosses(self.ranks) else super().start


class Late(Pending[Tensor]):
    """What is under way, and also has to pass the link."""

    def __init__(self, pending: Pending[Tensor], nbytes: float) -> None:
        self.pending, self.arrives = pending, link.send(round(nbytes))

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """See `Pending`."""
        sleep_until(self.arrives)
        return self.pending.wait(timeout_s)

    def done(self) -> bool:
        """See `Pending`."""
        return time.monotonic() > self.arrives and self.pending.done()


def ddp_hook(_, bucket):  # torch compares annotations, and would refuse ours as text
    """DDP's own average of a bucket, over the link."""
    flat = bucket.buffer()
    arrives = link.send(flat.numel() * flat.element_size())

    def arrive(future: Any) -> Tensor:
        sleep_until(arrives)
        return future.value()[0]

    work: Any = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(arrive)


def crosses(ranks: tuple[int, ...]) -> bool:
    """Whether these ranks are on both nodes."""
    half = world().size // 2
    return len({rank // half for rank in ranks}) > 1


def sleep_until(moment: float) -> None:
    """Sleep until `time.monotonic()` reaches `moment`."""
    time.sleep(max(0.0, moment - time.monotonic()))


def timed(run: Callable[[], object]) -> tuple[float, int]:
    """Return seconds and bytes on the link of a call. Collective over the world."""
    world().barrier()
    start, before = time.perf_counter(), link.bytes
    run()
    return time.perf_counter() - start, link.bytes - before

"""How one bucket becomes its mean over ranks, plainly; and how rows of sparse gradients do.

An averaging starts when a bucket is full and ends when somebody waits for it. Those that send less
than the bucket are in `compression.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.data_parallel.bucket import GradientBucket
from unisono.data_parallel.ranks import on_device


class Handle(ABC):
    """A bucket under way."""

    def proceed(self) -> None:  # noqa: B027
        """Start what comes after the first message; called on all ranks in the same order."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the bucket holds the mean, or raise. Local: starts no collective."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""


class OneMessage(Handle):
    """One collective under way, perhaps on a copy that goes back to the bucket."""

    def __init__(
        self, pending: Pending[Tensor], wire: Tensor | None = None, flat: Tensor | None = None
    ) -> None:
        self._pending = pending
        self._wire = wire
        self._flat = flat

    def wait(self) -> None:
        """Return when the bucket holds the mean."""
        self._pending.wait()
        if self._wire is not None and self._flat is not None:
            self._flat.copy_(self._wire)

    def done(self) -> bool:
        """Whether it holds it already."""
        return self._pending.done()


class Averaging(ABC):
    """A way to average buckets."""

    eager: bool = True
    """Whether buckets start during backward, or all at its end."""
    takes_means: bool = False
    """Whether it divides by the number of ranks itself; else the engine does while filing."""
    carries_flags: bool = True
    """Whether the flags at the end of a bucket travel with it."""
    bucket_count: int = 0
    """How many buckets a backward has; set by the engine."""
    steps: int = 0
    """Backwards whose buckets have all started; counted by the engine."""

    @abstractmethod
    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle | None:
        """Begin to average `bucket`; None: it holds the mean already.

        Collective; buckets start in the same order on all ranks.

        Args:
            bucket: filled.
            comm: the ranks, on the bucket's device.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what must be saved to go on exactly."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` gave."""


class PlainSum(Averaging):
    """One sum per bucket, as it is.

    Over a network it is under way while backward goes on. In shared memory ranks reduce each
    other's buckets in place. That is work for the same cores that run backward, so there is nothing
    to gain by starting early: one meeting at the end beats several in between.
    """

    def __init__(self, *, in_shared_memory: bool, blocking: bool) -> None:
        self.eager = not in_shared_memory
        self._at_once = in_shared_memory and blocking

    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle | None:
        """Begin to average a bucket. Collective."""
        if self._at_once:
            comm.all_reduce_(bucket.flat, "sum")
            return None
        return OneMessage(comm.start.all_reduce_(bucket.flat, "sum"))


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return ids of the parameters whose gradients will be sparse."""
    return {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }


class SparseParameters:
    """Parameters with sparse gradients: rows of all ranks are gathered, outside the buckets."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.used = [False] * len(self.params)
        """Whether each got a gradient since the last reduction."""

    @torch.no_grad()
    def average(self, comm: Communicator, weight: float) -> int:
        """Replace each gradient by the weighted sum over ranks; returns bytes. Collective."""
        sent = 0
        for i, param in enumerate(self.params):
            mine = torch.zeros_like(param) if param.grad is None else param.grad
            mine = (mine if mine.is_sparse else mine.to_sparse(1)).coalesce()
            counts = comm.all_gather_ints([int(self.used[i]), mine._nnz()])
            self.used[i] = False
            if not any(used for used, _ in counts):
                continue
            sizes = [count for _, count in counts]
            here = on_device(comm, param.device)
            values = mine.values() * weight
            param.grad = torch.sparse_coo_tensor(
                here.all_gather(mine.indices(), dim=1, sizes=sizes),
                here.all_gather(values, sizes=sizes),
                param.shape,
                check_invariants=False,
            ).coalesce()
            sent += values.numel() * values.element_size() + 8 * mine._nnz()
        return sent

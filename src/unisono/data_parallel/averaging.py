"""How one bucket becomes its mean over ranks: as it is, as 16-bit floats, or by a DDP hook.

An averaging starts when a bucket is full and ends when it is waited for. Sparse gradients pass
by the buckets: rows of all ranks are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.data_parallel.bucket import GradientBucket, weigh_
from unisono.data_parallel.ranks import on_device
from unisono.expect import refusal

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_POWER_SGD = "compression=functools.partial(powerSGD_hook, PowerSGDState(group, ...)), of torch"


@dataclass(frozen=True)
class PendingBucket:
    """A bucket under way."""

    wait: Callable[[], object]
    """Returns when the bucket holds the mean, or raises. Local: starts no collective."""
    done: Callable[[], bool]
    """Whether `wait` would return at once."""


class Averaging:
    """One mean per bucket, as it is.

    Over a network it is under way while backward goes on. In shared memory ranks reduce each
    other's buckets in place. That is work for the same cores that run backward, so there is nothing
    to gain by starting early: one meeting at the end beats several in between.
    """

    def __init__(self, comm: Communicator, *, blocking: bool) -> None:
        is_shared = comm.backend == "shm"
        self.eager = not is_shared
        """Whether buckets start during backward, or all at its end."""
        self.sent = 0
        """Bytes handed to the communicator so far."""
        self._at_once = is_shared and blocking

    def start(self, bucket: GradientBucket, comm: Communicator) -> PendingBucket | None:
        """Begin to average a filled bucket; None: it holds the mean already.

        Collective over `comm`, the ranks on the bucket's device; buckets start in the same order on
        all ranks.
        """
        self.sent += bucket.flat.nbytes
        if self._at_once:
            comm.all_reduce_(bucket.flat, "mean")
            return None
        pending = comm.start.all_reduce_(bucket.flat, "mean")
        return PendingBucket(pending.wait, pending.done)


class Cast(Averaging):
    """Gradients travel as 16-bit floats, at its end; added in float32, rounded once."""

    def __init__(self, dtype: torch.dtype, comm: Communicator) -> None:
        super().__init__(comm, blocking=True)
        self.eager = False
        self._dtype = dtype

    def start(self, bucket: GradientBucket, comm: Communicator) -> None:
        """Average a bucket. Collective."""
        flat = torch.view_as_real(bucket.flat).view(-1) if bucket.flat.is_complex() else bucket.flat
        wire = flat.to(self._dtype) if flat.element_size() > self._dtype.itemsize else flat
        if wire is flat or comm.backend == "shm":
            self.sent += wire.nbytes
            comm.all_reduce_(wire, "mean")
        else:
            # A backend's own sum would round after every addition, or travel wide: each rank adds
            # up its share of all ranks, then shares are joined.
            share = -(-wire.numel() // comm.size)
            even = [share] * comm.size
            self.sent += share * (comm.size + 1) * wire.itemsize
            parts = comm.all_to_all(nn.functional.pad(wire, (0, sum(even) - len(wire))), even, even)
            mean = parts.view(comm.size, share).float().mean(0).to(self._dtype)
            wire = comm.all_gather(mean, sizes=even)[: len(wire)]
        flat.copy_(wire)


class GradBucket:
    """A bucket as a user's compression function sees it: the interface of torch's hooks."""

    def __init__(self, bucket: GradientBucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return the flat local gradient, not yet averaged; it may be used as scratch space."""
        return self._bucket.data

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer, one per parameter."""
        return [slot.data for slot in self._bucket.slots]  # writes here are not the user's

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Whether this bucket is the last of a backward."""
        return self._bucket.is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Overwrite the buffer."""
        self._bucket.data.copy_(tensor.view(-1))


class UserFunction(Averaging):
    """`function(bucket) -> Future` of the averaged flat buffer."""

    def __init__(self, function: Callable[[Any], Any], comm: Communicator) -> None:
        super().__init__(comm, blocking=False)
        self.eager = True
        self._function = function
        self._last: torch.futures.Future[Any] | None = None

    def start(self, bucket: GradientBucket, comm: Communicator) -> PendingBucket:
        """Begin to average a bucket. Collective."""
        if self._last is not None:
            # The function may start messages of its own when others arrive. Nothing else may be
            # sent meanwhile, or ranks would send in different orders.
            self._last.wait()
        comm.all_reduce_(bucket.flags, "sum")
        data = bucket.data
        self.sent += bucket.flat.nbytes  # what the function makes of it, only the function knows
        future = self._last = self._function(GradBucket(bucket))

        def wait() -> None:
            result = future.wait()
            mean = result[0] if isinstance(result, list | tuple) else result
            if mean.data_ptr() != data.data_ptr():
                data.copy_(mean.view(-1))

        return PendingBucket(wait, future.done)


def check_compression(compression: object) -> None:
    """Raise ValueError unless `compression` is one of those there are."""
    is_function = callable(compression) and not isinstance(compression, type)
    is_cast = isinstance(compression, str) and compression in _CASTS
    if not (compression is None or is_function or is_cast):
        hint = 'one of None, "bf16", "fp16", or a function of a bucket, as a hook of torch\'s DDP'
        hint = _POWER_SGD if compression == "powersgd" else hint
        raise refusal(ValueError, f"compression={compression!r}", hint=hint)


def averaging_for(compression: Any, comm: Communicator, *, blocking: bool) -> Averaging:
    """Return the averaging that `compression` asks for, as the transport of `comm` does it best."""
    if compression is None:
        return Averaging(comm, blocking=blocking)
    if callable(compression):
        return UserFunction(compression, comm)
    return Cast(_CASTS[compression], comm)


class SparseParameters:
    """Parameters with sparse gradients: rows of all ranks are gathered, outside the buckets."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.used = [False] * len(self.params)
        """Whether each got a gradient since the last reduction."""

    @staticmethod
    def ids_in(module: nn.Module) -> set[int]:
        """Return ids of the parameters whose gradients will be sparse."""
        return {
            id(part.weight)
            for part in module.modules()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        }

    @torch.no_grad()
    def average(self, comm: Communicator, weight: float) -> int:
        """Replace each gradient by the weighted sum over ranks; returns bytes. Collective."""
        sent = 0
        for i, param in enumerate(self.params):
            is_used = self.used[i] and param.grad is not None  # it may have been cleared since
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            counts = comm.all_gather_ints([int(is_used), gradient._nnz()])
            self.used[i] = False
            if not any(used for used, _ in counts):
                continue
            sizes = [count for _, count in counts]
            here = on_device(comm, param.device)
            values = weigh_(gradient.values().clone(), weight)
            param.grad = torch.sparse_coo_tensor(
                here.all_gather(gradient.indices(), dim=1, sizes=sizes),
                here.all_gather(values, sizes=sizes),
                param.shape,
                check_invariants=False,
            ).coalesce()
            sent += values.nbytes + 8 * gradient._nnz()
        return sent

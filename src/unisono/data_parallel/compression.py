"""Sending less than the bucket: 16-bit floats, PowerSGD, or any function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.data_parallel.averaging import (
    Averaging,
    Direct,
    Done,
    Handle,
    InSharedMemory,
    OverNetwork,
)
from unisono.data_parallel.gradient_bucket import GradientBucket
from unisono.data_parallel.powersgd import PowerSGD, PowerSGDAveraging
from unisono.errors import explain

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ALLOWED = 'None, "bf16", "fp16", "powersgd", PowerSGD(rank=4), or a function of a bucket'


def check_compression(compression: object) -> None:
    """Raise ValueError unless `compression` is one of those there are."""
    if isinstance(compression, str):
        known = compression in _CASTS or compression == "powersgd"
    else:
        is_ready = compression is None or isinstance(compression, PowerSGD)
        known = is_ready or (callable(compression) and not isinstance(compression, type))
    if not known:
        raise ValueError(explain(f"compression={compression!r}", None, None, f"one of {_ALLOWED}"))


def averaging_for(compression: object, comm: Communicator, *, blocking: bool) -> Averaging:
    """Return the averaging that `compression` asks for, as the transport of `comm` does it best."""
    check_compression(compression)
    if compression is None:
        return InSharedMemory(blocking) if comm.backend == "shm" else OverNetwork()
    if isinstance(compression, str) and compression in _CASTS:
        return Cast(_CASTS[compression], blocking)
    if compression == "powersgd":
        return PowerSGDAveraging(PowerSGD())
    if isinstance(compression, PowerSGD):
        return PowerSGDAveraging(compression)
    if not callable(compression):
        raise TypeError(f"compression={compression!r}")
    return UserFunction(compression)


class Cast(Averaging):
    """Gradients travel as 16-bit floats; they are added in float32 and rounded once."""

    def __init__(self, dtype: torch.dtype, blocking: bool) -> None:
        self._dtype = dtype
        self._blocking = blocking
        self._wires: dict[int, Tensor] = {}

    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle:
        """See `Averaging`."""
        flat = bucket.flat
        if flat.element_size() <= self._dtype.itemsize:
            return Direct(comm.start.all_reduce_(flat, "sum"))
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if comm.backend == "shm":
            return self._in_shared_memory(bucket.index, flat, comm)
        return Shares(flat, self._dtype, comm)

    def _in_shared_memory(self, index: int, flat: Tensor, comm: Communicator) -> Handle:
        wire = self._wires.get(index)
        if wire is None or wire.numel() != flat.numel():
            wire = self._wires[index] = comm.shared_buffer((flat.numel(),), self._dtype)
        wire.copy_(flat)
        if self._blocking:
            comm.all_reduce_(wire, "sum")
            flat.copy_(wire)
            return Done()
        return Direct(comm.start.all_reduce_(wire, "sum"), wire, flat)


class Shares:
    """A narrow sum in two messages: each rank adds up its share of all, then shares are joined.

    A backend's own sum would round after every addition, or travel wide.
    """

    def __init__(self, flat: Tensor, dtype: torch.dtype, comm: Communicator) -> None:
        self._flat = flat
        self._comm = comm
        self._share = -(-flat.numel() // comm.size)
        wire = torch.zeros(self._share * comm.size, dtype=dtype, device=flat.device)
        wire[: flat.numel()].copy_(flat)
        even = [self._share] * comm.size
        self._first: Pending[Tensor] = comm.start.all_to_all(wire, even, even)
        self._second: Pending[Tensor] | None = None

    def proceed(self) -> None:
        """See `Handle`: add up the own share and send it to all."""
        parts = self._first.wait().view(self._comm.size, self._share)
        mine = parts.to(torch.float32).sum(0).to(parts.dtype)
        even = [self._share] * self._comm.size
        self._second = self._comm.start.all_gather(mine, sizes=even)

    def wait(self) -> None:
        """See `Handle`."""
        if self._second is None:
            self.proceed()
        if self._second is not None:
            self._flat.copy_(self._second.wait()[: self._flat.numel()])

    def done(self) -> bool:
        """See `Handle`."""
        return self._second is not None and self._second.done()


class GradBucket:
    """A bucket as a user's compression function sees it: the interface of torch's hooks."""

    def __init__(self, bucket: GradientBucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Return the flat local gradient, not yet averaged; it may be used as scratch space."""
        return self._bucket.data

    def gradients(self) -> list[Tensor]:
        """Return the gradients as views of the buffer, one a parameter."""
        return list(self._bucket.slots)

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._bucket.params)

    def is_last(self) -> bool:
        """Whether this bucket is the last of a backward."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Overwrite the buffer."""
        self._bucket.data.copy_(tensor.view(-1))


class UserFunction(Averaging):
    """`function(bucket) -> Future` of the averaged flat buffer."""

    carries_flags = False

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._last: Promised | None = None
        self.bucket_count = 0

    def factor(self, weight: float | None, size: int) -> float | None:
        """See `Averaging`: the function divides by the number of ranks itself."""
        return None if weight is None else weight * size

    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle:  # noqa: ARG002
        """See `Averaging`."""
        view = GradBucket(bucket, bucket.index == self.bucket_count - 1)
        if self._last is not None:
            self._last.proceed()
        self._last = Promised(bucket.data, self._function(view))
        return self._last


class Promised(Done):
    """A bucket whose mean a future brings."""

    def __init__(self, data: Tensor, future: torch.futures.Future[Any]) -> None:
        self._data = data
        self._future = future

    def proceed(self) -> None:
        """See `Handle`: wait, for the function may start messages of its own when others arrive.

        Nothing else may be sent meanwhile, or ranks would send in different orders.
        """
        self._future.wait()

    def wait(self) -> None:
        """See `Handle`."""
        result = self._future.wait()
        mean = result[0] if isinstance(result, list | tuple) else result
        if mean.data_ptr() != self._data.data_ptr():
            self._data.copy_(mean.view(-1))

    def done(self) -> bool:
        """See `Handle`."""
        return self._future.done()

"""How one bucket becomes its mean over ranks: plainly, as 16-bit floats, by PowerSGD or a function.

An averaging starts when a bucket is full and ends when it is waited for. Sparse gradients pass
by the buckets: rows of all ranks are gathered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.comm.perform import Pending
from unisono.data_parallel.bucket import GradientBucket, weigh
from unisono.data_parallel.ranks import average_tensors, on_device
from unisono.expect import expect_float, expect_int, refusal

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ALLOWED = 'None, "bf16", "fp16", "powersgd", PowerSGD(rank=4), or a function of a bucket'
_SEED = 20190901


@dataclass(frozen=True)
class PendingBucket:
    """A bucket under way."""

    wait: Callable[[], object]
    """Returns when the bucket holds the mean, or raises. Local: starts no collective."""
    done: Callable[[], bool]
    """Whether `wait` would return at once."""
    proceed: Callable[[], object] | None = None
    """Starts what comes after the first message, if something does; called on all ranks in the same
    order."""


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
    sent: int = 0
    """Bytes handed to the communicator so far."""

    @abstractmethod
    def start(self, bucket: GradientBucket, comm: Communicator) -> PendingBucket | None:
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

    def start(self, bucket: GradientBucket, comm: Communicator) -> PendingBucket | None:
        """Begin to average a bucket. Collective."""
        self.sent += bucket.nbytes
        if self._at_once:
            comm.all_reduce_(bucket.flat, "sum")
            return None
        pending = comm.start.all_reduce_(bucket.flat, "sum")
        return PendingBucket(pending.wait, pending.done)


@dataclass(frozen=True)
class PowerSGD:
    """Compression by low-rank factors with error feedback."""

    rank: int = 4
    """Columns of the factors."""
    start_step: int = 100
    """Steps that travel uncompressed first, while gradients change fast."""
    min_ratio: float = 2.0
    """A gradient is compressed only if it shrinks at least by this."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        expect_int("rank", self.rank, 1)
        expect_int("start_step", self.start_step, 0)
        expect_float("min_ratio", self.min_ratio, 0.0)

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape travels as factors.

        >>> PowerSGD(rank=4).compresses((1024, 784)), PowerSGD(rank=4).compresses((1024,))
        (True, False)
        """
        if len(shape) < 2 or 0 in shape:
            return False
        n, m = shape[0], math.prod(shape[1:])
        return (n + m) * self.rank * self.min_ratio < n * m


def check_compression(compression: object) -> None:
    """Raise ValueError unless `compression` is one of those there are."""
    if isinstance(compression, str):
        is_known = compression in _CASTS or compression == "powersgd"
    else:
        is_ready = compression is None or isinstance(compression, PowerSGD)
        is_known = is_ready or (callable(compression) and not isinstance(compression, type))
    if not is_known:
        raise refusal(ValueError, f"compression={compression!r}", hint=f"one of {_ALLOWED}")


def averaging_for(compression: Any, comm: Communicator, *, blocking: bool) -> Averaging:
    """Return the averaging that `compression` asks for, as the transport of `comm` does it best."""
    if compression is None:
        return PlainSum(in_shared_memory=comm.backend == "shm", blocking=blocking)
    if compression == "powersgd":
        compression = PowerSGD()
    if isinstance(compression, PowerSGD):
        return PowerSGDAveraging(compression)
    if isinstance(compression, str):
        return Cast(_CASTS[compression], blocking)
    return UserFunction(compression)


class Cast(Averaging):
    """Gradients travel as 16-bit floats; they are added in float32 and rounded once."""

    def __init__(self, dtype: torch.dtype, blocking: bool) -> None:
        self._dtype = dtype
        self._blocking = blocking
        self._wires: dict[int, Tensor] = {}

    def start(self, bucket: GradientBucket, comm: Communicator) -> PendingBucket | None:
        """Begin to average a bucket. Collective."""
        flat = bucket.flat
        if flat.element_size() <= self._dtype.itemsize:
            self.sent += bucket.nbytes
            pending = comm.start.all_reduce_(flat, "sum")
            return PendingBucket(pending.wait, pending.done)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if comm.backend != "shm":
            share = -(-flat.numel() // comm.size)
            self.sent += share * (comm.size + 1) * self._dtype.itemsize  # out, and its sum back
            return _in_shares(flat, self._dtype, comm)
        self.sent += flat.numel() * self._dtype.itemsize
        wire = self._wires.get(bucket.index)
        if wire is None or wire.numel() != flat.numel():
            wire = self._wires[bucket.index] = comm.shared_buffer((flat.numel(),), self._dtype)
        wire.copy_(flat)
        if self._blocking:
            flat.copy_(comm.all_reduce_(wire, "sum"))
            return None
        pending = comm.start.all_reduce_(wire, "sum")
        return PendingBucket(lambda: flat.copy_(pending.wait()), pending.done)


def _in_shares(flat: Tensor, dtype: torch.dtype, comm: Communicator) -> PendingBucket:
    """Start a narrow sum in two messages: each rank adds up its share, then shares are joined.

    A backend's own sum would round after every addition, or travel wide.
    """
    share = -(-flat.numel() // comm.size)
    even = [share] * comm.size
    wire = torch.zeros(share * comm.size, dtype=dtype, device=flat.device)
    wire[: flat.numel()].copy_(flat)
    first = comm.start.all_to_all(wire, even, even)
    joined: list[Pending[Tensor]] = []

    def proceed() -> None:
        if not joined:
            parts = first.wait().view(comm.size, share)
            reduced = parts.to(torch.float32).sum(0).to(dtype)
            joined.append(comm.start.all_gather(reduced, sizes=even))

    def wait() -> None:
        proceed()
        flat.copy_(joined[0].wait()[: flat.numel()])

    return PendingBucket(wait, lambda: bool(joined) and joined[0].done(), proceed)


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
        """Return the gradients as views of the buffer, one per parameter."""
        return [slot.data for slot in self._bucket.slots]  # writes here are not the user's

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

    takes_means = True
    carries_flags = False

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._last: torch.futures.Future[Any] | None = None

    def start(self, bucket: GradientBucket, comm: Communicator) -> PendingBucket:  # noqa: ARG002
        """Begin to average a bucket. Collective."""
        if self._last is not None:
            # The function may start messages of its own when others arrive. Nothing else may be
            # sent meanwhile, or ranks would send in different orders.
            self._last.wait()
        data = bucket.data
        self.sent += data.nbytes  # what the function makes of it, only the function knows
        future = self._last = self._function(
            GradBucket(bucket, bucket.index == self.bucket_count - 1)
        )

        def wait() -> None:
            result = future.wait()
            mean = result[0] if isinstance(result, list | tuple) else result
            if mean.data_ptr() != data.data_ptr():
                data.copy_(mean.view(-1))

        return PendingBucket(wait, future.done, future.wait)


class PowerSGDAveraging(Averaging):
    """A gradient matrix travels as two thin factors; what they miss is added next time.

    For a gradient G of n x m, with the part E that earlier steps left out: M = G + E; P = M Q; mean
    of P over ranks, orthonormalised; Q = M^T P; mean of Q; the averaged gradient is G' = P Q^T, and
    E = M - G'. Where an inf or NaN came in, G' is NaN, and Q and E stay as they were.
    Everything that is not compressed travels in one message.
    """

    eager = False
    takes_means = True  # error feedback wants gradients as they are

    def __init__(self, config: PowerSGD) -> None:
        self._config = config
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def start(self, bucket: GradientBucket, comm: Communicator) -> None:
        """Begin to average a bucket. Collective."""
        chosen = [
            i
            for i, param in enumerate(bucket.params)
            if self.steps >= self._config.start_step
            and self._config.compresses(param.shape)
            and not param.is_complex()
        ]
        if not chosen:
            self.sent += bucket.nbytes
            comm.all_reduce_(bucket.flat, "mean")
            return
        others = [slot for i, slot in enumerate(bucket.slots) if i not in chosen]
        others.append(bucket.flags)
        self.sent += sum(x.nbytes for x in others)
        average_tensors(others, comm)
        self._average_factors({bucket.names[i]: bucket.slots[i] for i in chosen}, comm)

    def _average_factors(self, slots: dict[str, Tensor], comm: Communicator) -> None:
        wholes: dict[str, Tensor] = {}
        for name, slot in slots.items():
            # A copy, so that the slot can take the result while the error needs the original.
            wide = torch.promote_types(slot.dtype, torch.float32)
            whole = slot.reshape(slot.shape[0], -1).to(wide, copy=True)
            error = self._errors.get(name)
            wholes[name] = whole if error is None else whole.add_(error)
        left_factors = {name: whole @ self._factor(name, whole) for name, whole in wholes.items()}
        self.sent += sum(p.nbytes for p in left_factors.values())
        average_tensors(left_factors.values(), comm)
        # An inf or NaN of one rank is in the means, which all ranks hold: they decide alike, and
        # on the device, since the host would have to wait for it.
        is_good = {name: p.isfinite().all() for name, p in left_factors.items()}
        left_factors = {
            name: torch.linalg.qr(p.nan_to_num(0, 0, 0)).Q for name, p in left_factors.items()
        }
        right = {name: wholes[name].T @ p for name, p in left_factors.items()}
        self.sent += sum(q.nbytes for q in right.values())
        average_tensors(right.values(), comm)
        for name, slot in slots.items():
            whole, mean = wholes[name], left_factors[name] @ right[name].T
            good = is_good[name] & mean.isfinite().all()
            # All ranks see that such a step does not count. Kept, it would spoil every later one.
            slot.copy_(torch.where(good, mean, torch.nan).view(slot.shape))
            error = self._errors.get(name, whole.new_zeros(()))
            self._errors[name] = torch.where(good, whole - mean, error)
            self._factors[name] = torch.where(good, right[name], self._factor(name, whole))

    def _factor(self, name: str, whole: Tensor) -> Tensor:
        """Return the right factor of the last step, or a random one, the same on all ranks."""
        factor = self._factors.get(name)
        columns = min(self._config.rank, *whole.shape)
        if factor is not None and factor.shape == (whole.shape[1], columns):
            return factor
        generator = torch.Generator().manual_seed(_SEED)
        start = torch.randn(whole.shape[1], columns, generator=generator, dtype=whole.dtype)
        return start.to(whole.device)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors, and the factors."""
        return {
            "step": self.steps,
            "errors": {name: x.clone() for name, x in self._errors.items()},
            "factors": {name: x.clone() for name, x in self._factors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.steps = int(state["step"])
        self._errors = {name: x.clone() for name, x in state["errors"].items()}
        self._factors = {name: x.clone() for name, x in state["factors"].items()}


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
            is_used = self.used[i] and param.grad is not None  # it may have been cleared since
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
            counts = comm.all_gather_ints([int(is_used), gradient._nnz()])
            self.used[i] = False
            if not any(used for used, _ in counts):
                continue
            sizes = [count for _, count in counts]
            here = on_device(comm, param.device)
            values = torch.empty_like(gradient.values())
            weigh(gradient.values(), weight, values)
            param.grad = torch.sparse_coo_tensor(
                here.all_gather(gradient.indices(), dim=1, sizes=sizes),
                here.all_gather(values, sizes=sizes),
                param.shape,
                check_invariants=False,
            ).coalesce()
            sent += values.numel() * values.element_size() + 8 * gradient._nnz()
        return sent

"""PowerSGD: a gradient matrix travels as two thin factors; what they miss is added next time.

For a gradient G of n x m, with the part E that earlier steps left out: M = G + E; P = M Q; mean
of P over ranks, orthonormalised; Q = M^T P; mean of Q; the averaged gradient is G' = P Q^T, and
E = M - G'. Where an inf or NaN came in, G' is NaN, and Q and E stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.data_parallel.averaging import Averaging, Done, Handle
from unisono.data_parallel.gradient_bucket import GradientBucket
from unisono.errors import explain

_SEED = 20190901


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
        for name, least in (("rank", 1), ("start_step", 0), ("min_ratio", 0)):
            value = getattr(self, name)
            kinds = (int, float) if name == "min_ratio" else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
                whole = "" if name == "min_ratio" else ", a whole number"
                hint = f"{name}={least} or more{whole}"
                raise ValueError(explain(f"PowerSGD({name}={value!r})", None, None, hint))

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape travels as factors.

        >>> PowerSGD(rank=4).compresses((1024, 784)), PowerSGD(rank=4).compresses((1024,))
        (True, False)
        """
        if len(shape) < 2 or 0 in shape:
            return False
        n, m = _matrix_sizes(shape)
        return (n + m) * self.rank * self.min_ratio < n * m


class PowerSGDAveraging(Averaging):
    """Averages buckets by PowerSGD; everything it does not compress travels in one message."""

    eager = False

    def __init__(self, config: PowerSGD) -> None:
        self._config = config
        self._step = 0
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def factor(self, weight: float | None, size: int) -> float | None:
        """See `Averaging`: error feedback wants gradients as they are, so means are taken here."""
        return None if weight is None else weight * size

    def start(self, bucket: GradientBucket, comm: Communicator) -> Handle:
        """See `Averaging`."""
        chosen = [
            i
            for i, param in enumerate(bucket.params)
            if self._step >= self._config.start_step
            and self._config.compresses(param.shape)
            and not param.is_complex()
        ]
        if not chosen:
            comm.all_reduce_(bucket.flat, "mean")
            return Done()
        others = [slot for i, slot in enumerate(bucket.slots) if i not in chosen]
        _mean_all([*others, bucket.flags], comm)
        self._average_factors({bucket.names[i]: bucket.slots[i] for i in chosen}, comm)
        return Done()

    def end_step(self) -> None:
        """See `Averaging`."""
        self._step += 1

    def _average_factors(self, slots: dict[str, Tensor], comm: Communicator) -> None:
        wholes: dict[str, Tensor] = {}
        for name, slot in slots.items():
            n, m = _matrix_sizes(slot.shape)
            # A copy, so that the slot can take the result while the error needs the original.
            wide = torch.promote_types(slot.dtype, torch.float32)
            whole = slot.reshape(n, m).to(wide, copy=True)
            error = self._errors.get(name)
            wholes[name] = whole if error is None else whole.add_(error)
        left = {name: whole @ self._factor(name, whole) for name, whole in wholes.items()}
        _mean_all(list(left.values()), comm)
        # An inf or NaN of one rank is in the mean, which all ranks hold: they decide alike.
        left = {name: torch.linalg.qr(p).Q for name, p in left.items() if _is_finite(p)}
        right = {name: wholes[name].T @ p for name, p in left.items()}
        _mean_all(list(right.values()), comm)
        for name, slot in slots.items():
            mean = left[name] @ right[name].T if name in left else None
            if mean is None or not _is_finite(mean):
                # Everybody sees that this step is none. Kept, it would spoil every later one.
                slot.fill_(torch.nan)
                continue
            slot.copy_(mean.view(slot.shape))
            self._errors[name] = wholes[name].sub_(mean)
            self._factors[name] = right[name]

    def _factor(self, name: str, whole: Tensor) -> Tensor:
        """Return the right factor of the last step, or a random one, the same on all ranks."""
        known = self._factors.get(name)
        columns = min(self._config.rank, *whole.shape)
        if known is not None and known.shape == (whole.shape[1], columns):
            return known
        generator = torch.Generator().manual_seed(_SEED)
        start = torch.randn(whole.shape[1], columns, generator=generator, dtype=whole.dtype)
        return start.to(whole.device)

    def state_dict(self) -> dict[str, Any]:
        """See `Averaging`: this rank's errors, and the factors."""
        return {
            "step": self._step,
            "errors": {name: x.clone() for name, x in self._errors.items()},
            "factors": {name: x.clone() for name, x in self._factors.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Averaging`."""
        self._step = int(state["step"])
        self._errors = {name: x.clone() for name, x in state["errors"].items()}
        self._factors = {name: x.clone() for name, x in state["factors"].items()}


def _matrix_sizes(shape: Sequence[int]) -> tuple[int, int]:
    m = 1
    for size in shape[1:]:
        m *= size
    return shape[0], m


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _mean_all(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Replace all tensors by their means over ranks, in one message."""
    if not tensors:
        return
    flat = torch.cat([x.reshape(-1) for x in tensors])
    comm.all_reduce_(flat, "mean")
    for x, mean in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(mean.view(x.shape))

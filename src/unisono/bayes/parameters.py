"""The parameters of a layer, their start values, and the flat memory that a net's layers share.

One flat buffer makes a step a handful of operations however many layers there are, and is the
bucket that data-parallel training reduces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.accelerator import is_accelerator
from unisono.errors import PartitionError
from unisono.expect import expect_choice

ALIGNED = 16
"""Every block of an arena starts at a multiple of this many numbers (a cache line)."""
CHUNK = 1 << 15
"""Numbers per piece of an update on the CPU, so that a piece stays in the cache."""
TAIL = 5
"""Numbers behind the deltas that data-parallel training adds: rows, the cap class one-hot, and
whether the rank has met a NaN."""
FLOOR = 1e-5
"""What a variance becomes that an update made zero or negative."""
CAPS = (0.1, 2.0, 3.0)
NAMES = ("mean_w", "var_w", "mean_b", "var_b")
"""Tensors of a layer, in the order of state dicts."""

_generator = torch.Generator()
"""The package's own: the global generators of torch and numpy are never read or set."""


def manual_seed(seed: int) -> None:
    """Seed the generator from which all layers of the package draw their start values."""
    _generator.manual_seed(seed)


def normal(shape: tuple[int, ...], scale: float) -> Tensor:
    """Draw N(0, scale**2) of this shape."""
    return torch.randn(shape, generator=_generator, dtype=torch.float32).mul_(scale)


def start_scale(method: str, fan_in: int, fan_out: int) -> float:
    """Return the standard deviation of start values.

    >>> start_scale("He", 4, 100)
    0.5
    """
    expect_choice("init_method", method, ("He", "Xavier"), error=PartitionError)
    return math.sqrt(1 / fan_in if method == "He" else 2 / (fan_in + fan_out))


def cap_class(batch: int) -> int:
    """Return which of `CAPS` bounds an update from this many rows.

    >>> [CAPS[cap_class(n)] for n in (1, 2, 255, 256)]
    [0.1, 2.0, 2.0, 3.0]
    """
    return 0 if batch <= 1 else 1 if batch < 256 else 2


class Parameters:
    """Means and variances of one layer's weights and biases, with their deltas.

    Without biases the bias tensors are empty. `home` is the arena they are views of, if any.
    """

    def __init__(
        self, mean_w: Tensor, var_w: Tensor, mean_b: Tensor | None, var_b: Tensor | None
    ) -> None:
        nothing = mean_w.new_empty(0)
        self.mean_w, self.var_w = mean_w, var_w
        self.mean_b = nothing if mean_b is None else mean_b
        self.var_b = nothing if var_b is None else var_b
        self.delta_mean_w = self.delta_var_w = self.delta_mean_b = self.delta_var_b = nothing
        self.deltas_written = False
        """Whether a user wrote deltas by hand that wait for a step."""
        self.home: Arena | None = None

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The live tensors in the order of state dicts: mu_w, var_w, mu_b, var_b."""
        return self.mean_w, self.var_w, self.mean_b, self.var_b

    @property
    def deltas(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The live deltas in the same order."""
        return self.delta_mean_w, self.delta_var_w, self.delta_mean_b, self.delta_var_b

    def move(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Leave the arena for tensors of our own on `device`; deltas are dropped."""
        for name in NAMES:
            moved = getattr(self, name).to(device=device, dtype=dtype)
            setattr(self, name, moved)
            setattr(self, f"delta_{name}", moved.new_empty(0))
        self.home = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the arena: a copy of each view, not of the whole buffer for each."""
        parts = {k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return {**parts, "home": None}

    def ensure_deltas(self) -> None:
        """Give a layer outside of any net deltas of zero."""
        if self.delta_mean_w.shape != self.mean_w.shape:
            for name in NAMES:
                setattr(self, f"delta_{name}", torch.zeros_like(getattr(self, name)))


class Arena:
    """One flat buffer for the means, one for the variances and one for the deltas of a net.

    The delta buffer is `[deltas of means | deltas of variances | TAIL numbers]`.
    """

    def __init__(
        self, members: Sequence[Parameters], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.members = tuple(members)
        sizes = [n for p in members for n in (p.mean_w.numel(), p.mean_b.numel())]
        padded = [math.ceil(n / ALIGNED) * ALIGNED for n in sizes]
        self.size = sum(padded)
        self.mean = torch.zeros(self.size, device=device, dtype=dtype)
        self.var = torch.ones(self.size, device=device, dtype=dtype)
        self.bucket = torch.zeros(2 * self.size + TAIL, device=device, dtype=dtype)
        self.floored = torch.zeros(len(self.members), dtype=torch.int64, device=device)
        self._starts = [0, *itertools.accumulate(padded)][:-1]
        for p, kind, start in self._places():
            for name, flat in ((f"mean_{kind}", self.mean), (f"var_{kind}", self.var)):
                old = getattr(p, name)
                setattr(p, name, _part(flat, start, old).copy_(old))
        for p in self.members:
            p.home = self
        self.point_deltas(self.bucket)

    @property
    def is_whole(self) -> bool:
        """Whether all members still live here; a layer may stand in another net, too."""
        return all(p.home is self for p in self.members)

    def _places(self) -> Iterator[tuple[Parameters, str, int]]:
        """Yield where the weights and the biases of each member start."""
        kinds = [(p, kind) for p in self.members for kind in "wb"]
        return ((p, kind, at) for (p, kind), at in zip(kinds, self._starts, strict=True))

    def point_deltas(self, bucket: Tensor) -> None:
        """Let all deltas live in `bucket`, of `2 * size + TAIL` numbers or more; values move."""
        self.bucket = bucket
        self.delta_mean = bucket[: self.size]
        self.delta_var = bucket[self.size : 2 * self.size]
        bucket[: 2 * self.size] = 0
        for p, kind, start in self._places():
            for name, flat in ((f"mean_{kind}", self.delta_mean), (f"var_{kind}", self.delta_var)):
                old, view = getattr(p, f"delta_{name}"), _part(flat, start, getattr(p, name))
                if old.shape == view.shape:
                    view.copy_(old)
                setattr(p, f"delta_{name}", view)

    def take_written(self) -> bool:
        """Return whether deltas written by hand wait for a step, and let none wait."""
        written = any(p.deltas_written for p in self.members)
        for p in self.members:
            p.deltas_written = False
        return written

    def scale_deltas(self) -> bool | Tensor:
        """Turn sums over the batch into deltas: times the variance, and its square.

        Returns:
            Whether there may be a NaN among them: one product of both, while they are in the cache.
            On an accelerator a tensor that says so, and all deltas are 0 then.
        """
        if is_accelerator(self.mean.device):
            self.delta_mean.mul_(self.var)
            self.delta_var.mul_(self.var).mul_(self.var)
            bad = torch.isnan(self.delta_mean).any() | torch.isnan(self.delta_var).any()
            self.delta_mean.masked_fill_(bad, 0.0)
            self.delta_var.masked_fill_(bad, 0.0)
            return bad
        product = 0.0
        for mean, var, v in self._pieces(self.delta_mean, self.delta_var, self.var):
            mean.mul_(v)
            var.mul_(v).mul_(v)
            product += float(mean.dot(var))
        return math.isnan(product)

    def step(self, cap: float) -> None:
        """Add the deltas, each at most `sqrt(var) / cap`, and floor the variances."""
        self.floored.zero_()
        needs_floor = is_accelerator(self.mean.device)  # where the host does not look
        for mean, v, dm, dv in self._pieces(self.mean, self.var, self.delta_mean, self.delta_var):
            bar = v.sqrt().div_(cap)
            low = bar.neg()
            mean.add_(dm.clamp(low, bar))
            v.add_(dv.clamp(low, bar))
            needs_floor = needs_floor or not float(v.amin()) > 0  # a NaN too
        if needs_floor:
            self._floor()

    def _floor(self) -> None:
        for i, p in enumerate(self.members):
            bad = p.var_w <= 0
            self.floored[i] = bad.sum()
            p.var_w.masked_fill_(bad, FLOOR)
            p.var_b.masked_fill_(p.var_b <= 0, FLOOR)

    def _pieces(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        if self.mean.device.type != "cpu" or self.size <= CHUNK:
            return iter([flats] if self.size else [])
        return zip(*(flat.split(CHUNK) for flat in flats), strict=True)


def _part(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the numbers from `start` on in the shape of `like`."""
    return flat[start : start + like.numel()].view(like.shape)

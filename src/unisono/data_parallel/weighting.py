"""How much each rank's gradient counts: equally, by samples, or among ranks with data left."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from unisono.comm.engines.algorithms import forcing
from unisono.data_parallel.construction import on_device
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.naming import Unfinished, named
from unisono.errors import explain


class Weights:
    """Weights of this rank's gradients.

    Within one accumulation (`no_sync` backwards and the one that synchronises) the k-th gradient is
    multiplied with n_k / r, where r is the first of them, so that the sum is worth r samples.

    Args:
        engine: asks for the weight at each synchronising backward.
    """

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine
        self._samples: float | None = None
        self._reference: float | None = None
        self._total = 0.0
        self._is_scaling = self._accumulates = False
        self.joining: bool | None = None
        """Inside `join`: whether this rank still has data."""
        self.divide_by_world = False
        """Inside `join`: whether ranks without data count."""

    @contextlib.contextmanager
    def samples(self, n: float) -> Iterator[None]:
        """Count the gradient of the backward inside as `n` samples."""
        _check_samples(n)
        before, self._samples = self._samples, float(n)
        self._accumulates = False
        try:
            with self.scaling():
                yield
            if self._accumulates:
                self._total += n
            elif self._engine.comm.size == 1:
                self._divide_alone(float(n))
        finally:
            self._samples = before

    @contextlib.contextmanager
    def scaling(self) -> Iterator[None]:
        """Multiply gradients as they come, where later ones of the accumulation need it.

        Entered by `samples` and by `no_sync`, in any order.
        """
        n = self._samples
        if n is not None and not self._engine.require_sync:
            self._accumulates = True
        is_alone = self._engine.comm.size == 1 and n == 0
        is_needed = self._accumulates or self._reference is not None or is_alone
        if n is None or self._is_scaling or not is_needed:
            yield
            return
        if self._reference is None and n > 0:
            self._reference = n
        factor = n / (self._reference or 1.0)
        params = [p for p in self._engine.module.parameters() if p.requires_grad]
        hooks = [p.register_hook(lambda grad: grad * factor) for p in params] if factor != 1 else []
        self._is_scaling = True
        try:
            yield
        finally:
            self._is_scaling = False
            for hook in hooks:
                hook.remove()

    def __call__(self) -> float | None:
        """Return this rank's weight in the backward that begins, None for an equal one.

        Collective over the ranks if they count samples or may have run out of data.
        """
        if self._samples is None and self._total == 0 and self.joining is None:
            return None
        mine, counted = 0.0, self._samples is not None or self._total > 0
        if self.joining is not False:
            mine = self._total + (self._samples or 0.0) if counted else 1.0
        comm = on_device(self._engine.comm, _device_of(self._engine))
        dtype = torch.float32 if comm.device.type == "mps" else torch.float64
        report = torch.tensor([[mine, float(counted)]], dtype=dtype, device=comm.device)
        # Odd in bytes, and gathered by a call of which gloo knows that it is none for a bucket:
        # a rank without weights cannot take it for one.
        odd = nn.functional.pad(report.view(torch.uint8), (0, 1))
        try:
            with forcing("all_gather", "native"):
                everybody = comm.all_gather(odd, sizes=[1] * comm.size)
            reports = everybody[:, :-1].contiguous().view(dtype)
        except Unfinished as error:
            raise named(error, "weights of this backward, from samples() or join()") from None
        total, anybody_counted = reports.sum(0).tolist()
        if not anybody_counted and self.divide_by_world:
            total = comm.size
        worth = mine if self._reference is None else self._reference
        self._reference, self._total = None, 0.0
        return worth / total if total > 0 and mine > 0 else 0.0

    def _divide_alone(self, n: float) -> None:
        """Finish an accumulation in a world of one, where nothing else sees to it."""
        total = self._total + n
        if self._reference is not None and total > 0:
            for param in self._engine.module.parameters():
                if param.grad is not None:
                    param.grad.mul_(self._reference / total)
        self._reference, self._total = None, 0.0


def _check_samples(n: object) -> None:
    is_number = isinstance(n, int | float | Tensor) and not isinstance(n, bool)
    if not is_number or not 0 <= float(n) < math.inf:  # type: ignore[arg-type]
        raise ValueError(
            explain(f"samples({n!r})", None, None, "samples(len(batch)), a number of at least 0")
        )


def _device_of(engine: GradientEngine) -> torch.device:
    buckets = engine.buckets
    return buckets[0].device if buckets else engine.comm.device

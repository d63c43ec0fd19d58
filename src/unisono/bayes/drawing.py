"""Start values: the package's own random generator and the two scales.

The global generators of torch and numpy are never read or set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unisono.errors import PartitionError

_generator = torch.Generator()

METHODS = ("He", "Xavier")


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
    if method not in METHODS:
        raise PartitionError.because(
            f"init_method={method!r}",
            f"methods are {', '.join(METHODS)}",
            None,
            'init_method="He"',
        )
    if fan_in < 1 or fan_out < 1:
        raise PartitionError.because(
            f"a layer of {fan_in} inputs and {fan_out} outputs",
            None,
            f"{min(fan_in, fan_out)} < 1",
            "1 or more of each",
        )
    if method == "He":
        return math.sqrt(1 / fan_in)
    return math.sqrt(2 / (fan_in + fan_out))

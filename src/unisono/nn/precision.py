"""In which dtype sums, statistics and functions under autocast are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from unisono.torch_private import transforms_active

NARROW = (torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """Return 16-bit values as float32: sums and statistics need the digits."""
    return x.float() if x.dtype in NARROW else x


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `wide` gives values of a dtype."""
    return torch.float32 if dtype in NARROW else dtype


def sum_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to sum a tensor in: float32 for 16 bits, whose means are finite then."""
    return torch.float32 if x.dtype in NARROW else None


def as_autocast(x: Tensor, function: Callable[..., Tensor], *args: object) -> Tensor:
    """Return a tensor in the dtype in which torch calls a function under autocast, if it is on.

    Which functions keep float32 differs between kinds of devices, so torch itself is asked, once.
    """
    kind = x.device.type
    if x.is_meta or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x
    return x.to(_autocast_dtype(function, args, x.dtype, kind, torch.get_autocast_dtype(kind)))


@cache
def _autocast_dtype(
    function: Callable[..., Tensor],
    args: tuple[object, ...],
    dtype: torch.dtype,
    kind: str,
    _: torch.dtype,
) -> torch.dtype:
    return function(torch.ones(1, 1, dtype=dtype, device=kind), *args).dtype


def is_plain(x: object) -> bool:
    """Whether nothing but ordinary autograd looks on: no autocast, no transform, no tracing."""
    return (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and (x.is_meta or not torch.is_autocast_enabled(x.device.type))
        and not torch.compiler.is_compiling()
        and not transforms_active()
        and forward_ad._current_level < 0
    )

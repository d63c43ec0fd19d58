"""Numbers as users bring them: lists, numpy arrays, torch tensors; and as they get them back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.errors import PartitionError

ArrayLike = Tensor | NDArray[Any] | Sequence[Any] | float
"""What every function of the package reads."""
Output = NDArray[Any] | Tensor
"""numpy for numpy, torch for torch."""


def to_tensor(data: ArrayLike, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return `data` as a contiguous tensor that later changes of an array do not reach."""
    if isinstance(data, Tensor):
        return data.detach().to(device=device, dtype=dtype).contiguous()
    try:
        array = np.asarray(data)
    except ValueError as error:  # rows of unlike lengths
        raise _no_numbers("rows of unlike lengths") from error
    if array.dtype.kind not in "biuf":
        first = array.flat[0] if array.size else None
        raise _no_numbers(f"objects of type {type(first).__name__}, the first is {first!r}")
    # numpy arrays of any stride, byte order and writability: one copy settles them all
    plain = np.array(array, dtype=np.float64 if dtype == torch.float64 else np.float32, order="C")
    return torch.from_numpy(plain).to(device=device, dtype=dtype)


def _no_numbers(found: str) -> PartitionError:
    return PartitionError.because(  # type: ignore[return-value]
        "an array of numbers",
        found,
        None,
        "rows of equal length; a missing value is float('nan')",
    )


def whole_numbers(values: Tensor, what: str) -> Tensor:
    """Return flat float64 numbers as int64; refuses fractions, naming the first."""
    bad = values != values.round()  # NaN too
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise PartitionError.because(
            f"{what} of {values.numel()} numbers",
            f"{what}[{first}] = {values[first].item():g}",
            f"{int(bad.sum())} of {values.numel()} are no whole numbers",
            "x.round() if they are whole but for rounding",
        )
    return values.to(torch.int64)


def to_array(data: Tensor) -> NDArray[Any]:
    """Return a flat numpy copy."""
    return data.detach().reshape(-1).cpu().numpy().copy()


def write_into(target: Tensor, data: ArrayLike, what: str) -> None:
    """Copy a sequence of the right length into a live tensor."""
    values = to_tensor(data, target.device, target.dtype).reshape(-1)
    if values.numel() != target.numel():
        raise PartitionError.because(
            f"{what} = {values.numel()} numbers",
            f"it has {target.numel()}",
            f"{values.numel()} != {target.numel()}",
            f"a sequence of {target.numel()} numbers",
        )
    target.copy_(values.view(target.shape))


def check_finite(values: Tensor, what: str, hint: str, *, missing: bool = False) -> None:
    """Refuse infinity, and NaN unless it stands for a missing value; names the first place."""
    if math.isfinite(values.sum().item()):  # one pass, the usual end; a sum may also overflow
        return
    bad = torch.isinf(values) if missing else ~torch.isfinite(values)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        at = f"[{', '.join(map(str, place))}]" if place else ""
        raise PartitionError.because(
            f"{what} of shape {tuple(values.shape)}",
            f"{what}{at} = {values[tuple(place)].item():g}",
            f"{int(bad.sum())} of {values.numel()} are not finite",
            hint,
        )


def check_sizes(layer: str, least: int = 1, **sizes: int) -> None:
    """Refuse sizes of a layer that are no whole numbers of at least `least`."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or size < least:
            raise PartitionError.because(
                f"{layer}({name}={size})",
                f"{name} counts in whole numbers from {least}",
                f"{size} < {least}" if isinstance(size, int | np.integer) else None,
                f"{name}={max(least, 1)}",
            )


def check_variance(var: Tensor, what: str) -> None:
    """Refuse negative and NaN variances, naming the first."""
    bad = ~(var.reshape(-1) >= 0)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise PartitionError.because(
            f"{what} of {var.numel()} numbers",
            f"{what}[{first}] = {float(var.reshape(-1)[first]):g}",
            f"{int(bad.sum())} of {var.numel()} are negative or NaN",
            "variances are standard deviations squared, zero or more",
        )

"""Gaussian numbers: as users bring them, as they travel through a net, and in flat buffers.

`Moments` go forward and a `Delta` comes back; `BaseHiddenStates` and `BaseDeltaStates` hold both
between a net and its updater.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono.accelerator import is_accelerator
from unisono.errors import PartitionError, UnisonoError
from unisono.expect import expect_int

ArrayLike = Tensor | NDArray[Any] | Sequence[Any] | float
"""What every function of the package reads."""
Output = NDArray[Any] | Tensor
"""numpy for numpy, torch for torch."""


def to_tensor(
    data: ArrayLike,
    device: torch.device,
    dtype: torch.dtype,
    check: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Return `data` as a contiguous tensor that later changes of it do not reach.

    `check` raises if its values will not do. It is called where these are, before they go to an
    accelerator, for which the host would have to wait; not for values that are there already.
    """
    if isinstance(data, Tensor):
        if data.is_complex():
            raise _not_numbers(f"complex ones, {data.dtype}")
        form = torch.contiguous_format
        if check is not None and not is_accelerator(data.device):
            check(data.detach().to(dtype))
        return data.detach().to(device=device, dtype=dtype, copy=True, memory_format=form)
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise _not_numbers("rows of unlike lengths") from error
    if array.dtype.kind not in "biuf":
        first = array.flat[0] if array.size else None
        raise _not_numbers(f"objects of type {type(first).__name__}, the first is {first!r}")
    # numpy arrays of any stride, byte order and writability: one copy settles them all
    plain = np.array(array, dtype=np.float64 if dtype == torch.float64 else np.float32, order="C")
    values = torch.from_numpy(plain).to(dtype)
    if check is not None:
        check(values)
    return values.to(device, non_blocking=True)


def _not_numbers(content: str) -> UnisonoError:
    hint = "rows of equal length; a missing value is float('nan')"
    return PartitionError.because("an array of numbers", content, hint=hint)


def to_array(data: Tensor) -> NDArray[Any]:
    """Return a flat numpy copy."""
    return data.detach().reshape(-1).cpu().numpy().copy()


def integers(values: Tensor, what: str) -> Tensor:
    """Return flat numbers as int64; refuses fractions, naming the first."""
    bad = values != values.round()  # NaN too
    if bool(bad.any()):
        raise first_bad(what, values, bad, "not integers", "x.round() if only rounding is off")
    return values.to(torch.int64)


def check_count(request: str, count: int, expected: int, hint: str) -> None:
    """Refuse another number of things than belongs here."""
    if count != expected:
        raise PartitionError.because(request, arithmetic=f"{count} != {expected}", hint=hint)


def check_finite(values: Tensor, what: str, hint: str, *, missing: bool = False) -> None:
    """Refuse infinity, and NaN unless it stands for a missing value; names the first place."""
    if math.isfinite(values.sum().item()):  # one pass, the usual end; a sum may also overflow
        return
    bad = torch.isinf(values) if missing else ~torch.isfinite(values)
    if bool(bad.any()):
        raise first_bad(what, values, bad, "not finite", hint)


def check_variance(var: Tensor, what: str) -> None:
    """Refuse negative and NaN variances, naming the first."""
    var = var.reshape(-1)
    if not var.numel() or var.amin().item() >= 0:  # one pass, the usual end; not with a NaN
        return
    hint = "variances are standard deviations squared, zero or more"
    raise first_bad(what, var, ~(var >= 0), "negative or NaN", hint)


def first_bad(what: str, values: Tensor, bad: Tensor, wrong: str, hint: str) -> UnisonoError:
    """Return the error that names the first bad entry and counts them all."""
    place = bad.nonzero()[0].tolist()
    at = f"[{', '.join(map(str, place))}]" if place else ""
    return PartitionError.because(
        f"{what} of shape {tuple(values.shape)}",
        f"{what}{at} = {values[tuple(place)].item():g}",
        f"{int(bad.sum())} of {values.numel()} are {wrong}",
        hint,
    )


class Moments(NamedTuple):
    """Gaussian units on their way forward; all tensors have one shape `[batch, ...]`."""

    mean: Tensor
    var: Tensor | None = None
    """None: the values are certain."""
    slope: Tensor | None = None
    """`Cov(z, a) / Var(z)` of the activations passed since the last layer with units of its own;
    None is 1."""

    def reshaped(self, *shape: int) -> Moments:
        """Return the same units in another shape."""
        mean, var, slope = self
        return Moments(
            mean.reshape(shape),
            None if var is None else var.reshape(shape),
            None if slope is None else slope.reshape(shape),
        )

    def spread(self) -> Tensor:
        """Return the variance as a tensor, zeros for certain values."""
        return torch.zeros_like(self.mean) if self.var is None else self.var


class Delta(NamedTuple):
    """A correction on its way back, divided by the prior variance.

    `mean = (mu_post - mu) / var` and `var = (var_post - var) / var**2`.
    """

    mean: Tensor
    var: Tensor

    def reshaped(self, *shape: int) -> Delta:
        """Return the same correction in another shape."""
        return Delta(self.mean.reshape(shape), self.var.reshape(shape))

    def through(self, slope: Tensor | None) -> Delta:
        """Return the correction before the activations whose slope this is."""
        if slope is None:
            return self
        slope = slope.reshape(self.mean.shape)
        return Delta(self.mean * slope, self.var * slope * slope)

    def through_(self, slope: Tensor | None) -> Delta:
        """As `through`, in place: for deltas that nobody else holds."""
        if slope is not None:
            slope = slope.reshape(self.mean.shape)
            self.mean.mul_(slope)
            self.var.mul_(slope).mul_(slope)
        return self


def _numbers(name: str, doc: str) -> property:
    """Return a property of a buffer: reading copies to numpy, assigning writes."""

    def read(buffer: _Buffer) -> NDArray[Any]:
        return to_array(buffer.live[name])

    def write(buffer: _Buffer, values: ArrayLike) -> None:
        buffer.write(name, values)

    return property(read, write, doc=doc)


class _Buffer:
    """Flat tensors of one length, and the number of samples they belong to."""

    fields: tuple[str, ...] = ()

    def __init__(self, size: int | None = None, block_size: int | None = None) -> None:
        self.block_size = block_size or 0
        """Samples."""
        self.live = {name: torch.zeros(size or 0) for name in self.fields}
        self.is_written = False
        """Whether somebody wrote since the net's last forward."""

    @property
    def size(self) -> int:
        """Numbers held."""
        return self.live["mean"].numel()

    @property
    def actual_size(self) -> int:
        """Numbers of one sample."""
        return self.size // self.block_size if self.block_size else self.size

    def write(self, name: str, values: ArrayLike) -> None:
        """Replace one of the tensors."""
        like = self.live[name]
        self.live[name] = to_tensor(values, like.device, like.dtype).reshape(-1)
        self.is_written = True

    def get_name(self) -> str:
        """Return the name of the class."""
        return type(self).__name__

    def set_size(self, new_size: int, new_block_size: int) -> str:
        """Become zeros of another size; returns the name."""
        self.block_size = new_block_size
        self.live = {name: torch.zeros(new_size) for name in self.fields}
        return self.get_name()


class BaseHiddenStates(_Buffer):
    """Means, variances and slopes of units, flat; reading copies, assigning writes.

    Args:
        size: numbers.
        block_size: samples.
    """

    fields = ("mean", "var", "slope")
    mu_a = _numbers("mean", "Means.")
    var_a = _numbers("var", "Variances.")
    jcb = _numbers("slope", "Slopes of the activations before.")

    def hold(self, x: Moments) -> None:
        """Hold these moments."""
        slope = torch.ones_like(x.mean) if x.slope is None else x.slope
        self.live = {
            "mean": x.mean.reshape(-1),
            "var": x.spread().reshape(-1),
            "slope": slope.reshape(-1),
        }
        self.block_size = x.mean.shape[0]

    def set_input_x(self, mu_x: ArrayLike, var_x: ArrayLike | None, block_size: int) -> None:
        """Become the input of a net: slopes are 1, variances 0 unless given."""
        self.write("mean", mu_x)
        mean = self.live["mean"]
        if var_x is None:
            self.live["var"] = torch.zeros_like(mean)
        else:
            self.write("var", var_x)
        self.live["slope"] = torch.ones_like(mean)
        self.block_size = block_size


class BaseDeltaStates(_Buffer):
    """Deltas of units, flat; reading copies, assigning writes.

    Args:
        size: numbers.
        block_size: samples.
    """

    fields = ("mean", "var")
    delta_mu = _numbers("mean", "Deltas of means.")
    delta_var = _numbers("var", "Deltas of variances.")

    def hold(self, delta: Delta, block_size: int | None = None) -> None:
        """Hold these deltas."""
        self.live = {"mean": delta.mean.reshape(-1), "var": delta.var.reshape(-1)}
        self.block_size = delta.mean.shape[0] if block_size is None else block_size
        self.is_written = True

    def expect(self, like: Tensor, block_size: int) -> None:
        """Become zeros that await the updater; `like` has the device and dtype."""
        zeros = like.new_zeros(()).expand(like.numel())
        self.live = {"mean": zeros, "var": zeros}
        self.block_size, self.is_written = block_size, False

    def reset_zeros(self) -> None:
        """Set all deltas to zero."""
        self.live = {name: torch.zeros_like(t) for name, t in self.live.items()}
        self.is_written = True

    def copy_from(self, source: BaseDeltaStates, num_data: int = -1) -> None:
        """Take the first `num_data` deltas of another buffer; -1 takes all."""
        count = source.size if num_data == -1 else num_data
        expect_int("num_data", count, 0, source.size + 1, error=PartitionError)
        self.live = {name: source.live[name][:count].clone() for name in self.fields}
        self.block_size, self.is_written = source.block_size, True

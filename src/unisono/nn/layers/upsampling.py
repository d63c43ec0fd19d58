"""Upsampling of split tensors: torch's `interpolate` on blocks, and its local part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.errors import PartitionError
from unisono.nn.layers.function_layer import FunctionLayer
from unisono.nn.split_tensors.windows import MODES, Taps, resampled, taps_of
from unisono.topology import Partition
from unisono.topology.resample import Resampling

_DIMS = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}


class DistributedUpsample(FunctionLayer):
    """`torch.nn.Upsample` of a tensor `(N, C, ...)` split in any dims.

    Args:
        P_x: partition of the input.
        size: spatial sizes of the whole output, or
        scale_factor: by how much each spatial dim grows. Exactly one of the two.
        mode: nearest, nearest-exact, linear, bilinear, trilinear, bicubic.
        align_corners: as in torch; not for the nearest modes.
    """

    def __init__(
        self,
        P_x: Partition,
        size: int | Sequence[int] | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
    ) -> None:
        super().__init__()
        space = P_x.dim - 2
        if (size is None) == (scale_factor is None):
            raise PartitionError.because(
                f"DistributedUpsample(size={size}, scale_factor={scale_factor})",
                "both" if size is not None else "neither",
                "exactly one of size and scale_factor",
                "scale_factor=2",
            )
        if mode not in MODES or _DIMS.get(mode, space) != space:
            fitting = [name for name in MODES if _DIMS.get(name, space) == space]
            raise PartitionError.because(
                f"DistributedUpsample(mode={mode!r})",
                f"{space} spatial dims: {', '.join(map(repr, fitting))}",
                None,
                f"mode={fitting[-1]!r}",
            )
        if align_corners is not None and mode.startswith("nearest"):
            raise PartitionError.because(
                f"DistributedUpsample(mode={mode!r}, align_corners={align_corners})",
                "align_corners is for linear and cubic modes",
                None,
                "align_corners=None",
            )
        self.P_x = P_x
        self.mode = mode
        self.align_corners = align_corners
        self.size = _each(size, space, "size")
        self.scale_factor = _each(scale_factor, space, "scale_factor")

    def _check(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: ARG002
        _check_dtype(type(self).__name__, self.mode, dtype)
        if dtype.is_complex and not self.mode.startswith("nearest"):
            raise PartitionError.because(
                f"{type(self).__name__}(mode={self.mode!r}) of {dtype}",
                "torch resizes complex tensors in the nearest modes only",
                None,
                "real and imaginary part, one after the other",
            )

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's balanced share of the upsampled tensor."""
        if not self._takes_part:
            return self._outside(input)
        x = self._tied(input)
        sizes = None if self.size is None else tuple(map(int, self.size))
        how = sizes, self.scale_factor, self.mode, self.align_corners
        if self._plan.cuts or x.is_floating_point() or x.dtype == torch.uint8:
            return self._called(F.interpolate, x, *how)
        # One rank alone calls torch, which resizes no other integers: it resizes their places.
        space = x.shape[2:]
        places = torch.arange(space.numel(), dtype=torch.float64, device=x.device)
        chosen = F.interpolate(places.view(1, 1, *space), *how)
        picked = x.flatten(2).index_select(2, chosen.long().flatten())
        return picked.unflatten(2, chosen.shape[2:])


class Interpolate(torch.nn.Module):
    """The local part of an upsampling: own inputs to own outputs, without communication.

    Args:
        x_local_start: where the own input begins in the whole one, for each dim; `x_local_stop`
            where it ends, `x_global_shape` the whole sizes; likewise for the output `y`.
        scale_factor: the factor, if it was given; None for the ratio of the sizes.
        mode: as `DistributedUpsample`.
        align_corners: as in torch.
    """

    def __init__(
        self,
        x_local_start: Sequence[int],
        x_local_stop: Sequence[int],
        x_global_shape: Sequence[int],
        y_local_start: Sequence[int],
        y_local_stop: Sequence[int],
        y_global_shape: Sequence[int],
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        super().__init__()
        self._mode = mode
        scales = _each(scale_factor, len(x_global_shape) - 2, "scale_factor")
        dims = range(2, len(x_global_shape))
        self._inputs = [(x_local_start[at], x_local_stop[at]) for at in dims]
        self._outputs = [(y_local_start[at], y_local_stop[at]) for at in dims]
        self._taps, self._taps_double = (
            tuple(
                taps_of(
                    Resampling(
                        x_global_shape[at], y_global_shape[at], MODES.get(mode, mode),
                        None if scales is None else scales[at - 2], align_corners, double,
                    ),
                    y_local_start[at], y_local_stop[at], x_local_start[at],
                )
                for at in dims
            )
            for double in (False, True)
        )  # fmt: skip
        self._check(self._taps)

    def _check(self, taps: Sequence[Taps]) -> None:
        """Raise if an output needs a point that this rank does not have."""
        for i, ((x0, x1), (y0, y1), dim_taps) in enumerate(
            zip(self._inputs, self._outputs, taps, strict=True)
        ):
            outside = [p for tap in dim_taps.points for p in tap if not 0 <= p < x1 - x0]
            if outside:
                raise PartitionError.because(
                    f"Interpolate of points [{x0}, {x1})",
                    f"outputs [{y0}, {y1}) of dim {i + 2}",
                    f"needs point {outside[0] + x0}",
                    "give it all points under its outputs, as DistributedUpsample does",
                )

    def forward(self, input: Tensor) -> Tensor:
        """Return the own outputs."""
        x = input
        _check_dtype(type(self).__name__, self._mode, x.dtype)
        if x.dtype != torch.float64:
            return resampled(x, self._taps)
        self._check(self._taps_double)  # the nearest point may be another one
        return resampled(x, self._taps_double)


def _check_dtype(name: str, mode: str, dtype: torch.dtype) -> None:
    """Raise for values that have no weighted sums: only the nearest modes copy points."""
    if dtype.is_floating_point or dtype.is_complex or mode.startswith("nearest"):
        return
    raise PartitionError.because(
        f"{name}(mode={mode!r}) of {dtype}",
        "weights between 0 and 1",
        "integers have no weighted sums",
        'x.float(), or mode="nearest"',
    )


def _each(value: object, count: int, name: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    values = tuple(value) if isinstance(value, Sequence) else (value,) * count
    if len(values) != count:
        raise PartitionError.because(
            f"DistributedUpsample({name}={list(values)})",
            f"{count} spatial dims",
            f"{len(values)} != {count}",
            f"one number, or {count} of them",
        )
    return values  # type: ignore[return-value]

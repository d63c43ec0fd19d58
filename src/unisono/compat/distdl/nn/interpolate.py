"""DistDL's `nn.interpolate`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono import nn as ours

__all__ = ["Interpolate"]

Ints = Sequence[int] | Tensor


class Interpolate(ours.Interpolate):
    """The local part of an upsampling: own inputs to own outputs, without communication."""

    def __init__(
        self,
        x_local_start: Ints,
        x_local_stop: Ints,
        x_global_shape: Ints,
        y_local_start: Ints,
        y_local_stop: Ints,
        y_global_shape: Ints,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
    ) -> None:
        super().__init__(
            _ints(x_local_start),
            _ints(x_local_stop),
            _ints(x_global_shape),
            _ints(y_local_start),
            _ints(y_local_stop),
            _ints(y_global_shape),
            scale_factor,
            mode,
            align_corners,
        )


def _ints(values: Ints) -> list[int]:
    return [int(n) for n in values]

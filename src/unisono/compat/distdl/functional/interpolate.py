"""DistDL's `functional.interpolate`."""

from __future__ import annotations

from torch import Tensor

from ..nn.interpolate import Interpolate, Ints


class InterpolateFunction:
    """Own outputs of an upsampling from own inputs, without communication."""

    @staticmethod
    def apply(
        input: Tensor,
        scale_factor: float | None,
        mode: str,
        align_corners: bool,
        x_start: Ints,
        x_stop: Ints,
        x_global_shape: Ints,
        y_start: Ints,
        y_stop: Ints,
        y_global_shape: Ints,
    ) -> Tensor:
        """Return outputs `[y_start, y_stop)` from inputs `[x_start, x_stop)`.

        Args:
            input: own inputs, all that the outputs need.
            scale_factor: if it was given; None for the ratio of the sizes.
            mode: "nearest", "linear" or "cubic".
            align_corners: as in torch.
            x_start: where `input` begins in the whole one, for each dim; likewise the others.
        """
        boxes = (x_start, x_stop, x_global_shape, y_start, y_stop, y_global_shape)
        return Interpolate(*boxes, scale_factor, mode, align_corners)(input)

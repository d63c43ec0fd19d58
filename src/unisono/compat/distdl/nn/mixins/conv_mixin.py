"""DistDL's `nn.mixins.conv_mixin`: the inputs under an output of a convolution."""

from __future__ import annotations

from typing import Any


class ConvMixin:
    """First and last input, padding included, that an output reads. Ints or arrays of them."""

    def _compute_min_input_range(
        self,
        idx: Any,
        kernel_size: Any,  # noqa: ARG002 - the same for both ends
        stride: Any,
        padding: Any,
        dilation: Any,  # noqa: ARG002
    ) -> Any:
        """Return the first input of output `idx`."""
        return stride * idx - padding

    def _compute_max_input_range(
        self, idx: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
    ) -> Any:
        """Return the last input of output `idx`."""
        return stride * idx - padding + dilation * (kernel_size - 1)

"""`Conv2d` and `ConvTranspose2d` with Gaussian kernels, on `[batch, channels, height, width]`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.bayes.layers.base import check_sizes
from unisono.bayes.layers.window import WindowLayer
from unisono.bayes.moments import Delta, Moments
from unisono.errors import PartitionError


class _Convolution(WindowLayer):
    """What both kinds share: start values, moments, deltas."""

    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        bias: bool = True,
        stride: int = 1,
        padding: int = 0,
        padding_type: int = 1,
        in_width: int = 0,
        in_height: int = 0,
        gain_weight: float = 1.0,
        gain_bias: float = 1.0,
        init_method: str = "He",
    ) -> None:
        super().__init__(kernel_size, stride, padding, padding_type)
        check_sizes(self, in_channels=in_channels, out_channels=out_channels)
        check_sizes(self, 0, in_width=in_width, in_height=in_height)
        self.in_channels, self.out_channels, self.bias = in_channels, out_channels, bias
        self.in_width, self.in_height = in_width, in_height
        self.gain_weight, self.gain_bias, self.init_method = gain_weight, gain_bias, init_method
        self._declared = (in_channels, in_height, in_width)
        self.init_weight_bias()
        if in_width and in_height:
            self.plan(None)

    def init_weight_bias(self) -> None:
        """Draw new start values."""
        area = self.kernel_size**2
        ends = (self.in_channels, self.out_channels)
        shape = (*(ends if self.transposed else ends[::-1]), self.kernel_size, self.kernel_size)
        self._draw(shape, (self.out_channels,), area * self.in_channels, area * self.out_channels)

    def forward(self, x: Moments) -> Moments:
        """The moments of `Linear`, with convolution as the product."""
        p = self._live
        x = self._images(x)
        mean, var = self._padded(x.mean), None if x.var is None else self._padded(x.var)
        square = mean * mean
        mean_b, var_b = (p.mean_b, p.var_b) if self.bias else (None, None)
        out_mean = self._product(mean, p.mean_w, mean_b)
        if var is None:
            out_var, weight_square = self._product(square, p.var_w, var_b), None
        else:
            weight_square = p.mean_w * p.mean_w
            out_var = self._product(square + var, p.var_w, var_b)
            out_var += self._product(var, weight_square, None)
        self._remember(mean, square, x.slope, weight_square)
        return Moments(out_mean, out_var)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """As `Linear`, with the two derivatives of a convolution as products."""
        p = self._live
        mean, square, slope, weight_square = self._memory
        delta = delta.reshaped(mean.shape[0], self.out_channels, self.out_height, self.out_width)
        if weight_square is None and to_input:
            weight_square = p.mean_w * p.mean_w
        dm, sum_w, sum_b = self._derivatives(delta.mean, mean, p.mean_w, to_input)
        p.delta_mean_w.copy_(sum_w)
        dv, var_sum_w, var_sum_b = self._derivatives(
            delta.var, square, p.mean_w if weight_square is None else weight_square, to_input
        )
        p.delta_var_w.copy_(var_sum_w)
        if self.bias:
            p.delta_mean_b.copy_(sum_b)
            p.delta_var_b.copy_(var_sum_b)
        return Delta(self._cropped(dm), self._cropped(dv)).through_(slope) if to_input else None

    @property
    def _symmetric(self) -> int:
        """Padding that torch's convolution does itself."""
        return self.padding if self.padding_type == 1 else 0

    @property
    def _sides(self) -> tuple[int, int]:
        """Padding on one side only, which torch's convolution does not know."""
        return 0, self.padding if self.padding_type == 2 and not self.transposed else 0

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self._symmetric)

    def _derivatives(
        self, delta: Tensor, x: Tensor, weight: Tensor, to_input: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.aten.convolution_backward(
            delta,
            x,
            weight,
            bias_sizes=[self.out_channels],
            stride=[self.stride] * 2,
            padding=[self._symmetric] * 2,
            dilation=[1, 1],
            transposed=self.transposed,
            output_padding=[0, 0],
            groups=1,
            output_mask=[to_input, True, self.bias],
        )


class Conv2d(_Convolution):
    """Convolution; weights `[out_channels, in_channels, k, k]`.

    Args:
        in_channels: channels of the input image.
        out_channels: channels of the output image.
        kernel_size: side of the square window.
        bias: whether to add a bias per channel.
        stride: step of the window; `(size + padding - kernel_size) / stride` must be whole.
        padding: zeros around the image.
        padding_type: 1 on all four sides, 2 on the right and the bottom only, else none.
        in_width: width of the image, needed where the input is flat.
        in_height: height of the image, needed where the input is flat.
        gain_weight: factor on the start standard deviation of weights.
        gain_bias: factor on the start standard deviation of biases.
        init_method: `"He"` or `"Xavier"`.

    >>> Conv2d(1, 16, 4, padding=1, in_width=28, in_height=28)
    Conv2d(1,16,27,27,4)
    """


class ConvTranspose2d(_Convolution):
    """Transposed convolution; weights `[in_channels, out_channels, k, k]`. Arguments as `Conv2d`.

    Its output has `stride * (size - 1) + kernel_size - padding` entries along a dim, where
    padding counts on both sides (type 1) or on the right and the bottom (type 2).

    >>> ConvTranspose2d(4, 1, 4, stride=2, padding=1, in_width=7, in_height=7)
    ConvTranspose2d(4,1,14,14,4)
    """

    transposed = True

    def _outputs(self, size: int, padded: int, dim: str) -> int:
        """Return the length of the output along one dim."""
        kernel, stride = self.kernel_size, self.stride
        length = stride * (size - 1) + kernel - padded
        if length < 1:
            raise PartitionError.because(
                f"{self.get_layer_name()} with kernel_size={kernel}, stride={stride}",
                f"{dim} {size} and {padded} cut off",
                f"{stride} * ({size} - 1) + {kernel} - {padded} = {length}",
                "less padding",
            )
        return length

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        full = F.conv_transpose2d(x, weight, bias, self.stride, self._symmetric)
        return full[..., : self.out_height, : self.out_width]

    def _derivatives(
        self, delta: Tensor, x: Tensor, weight: Tensor, to_input: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        cut = self.padding if self.padding_type == 2 else 0
        return super()._derivatives(F.pad(delta, (0, cut, 0, cut)), x, weight, to_input)

"""`Linear`: a weighted sum of Gaussian units with Gaussian weights."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from unisono.bayes.layers.base import BaseLayer, Shape, check_sizes
from unisono.bayes.moments import Delta, Moments


class Linear(BaseLayer):
    """Full connection; weights `[output_size, input_size]`, all units and weights independent.

    Args:
        input_size: numbers of one sample; an image or sequence before it is flattened.
        output_size: units.
        bias: whether to add a bias.
        gain_weight: factor on the start standard deviation of weights.
        gain_bias: factor on the start standard deviation of biases.
        init_method: `"He"` or `"Xavier"`.

    >>> Linear(3, 2)
    Linear(3,2)
    """

    info = "{name}({0.input_size},{0.output_size})"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gain_weight: float = 1.0,
        gain_bias: float = 1.0,
        init_method: str = "He",
    ) -> None:
        super().__init__()
        check_sizes(self, input_size=input_size, output_size=output_size)
        self.input_size, self.output_size, self.bias = input_size, output_size, bias
        self.gain_weight, self.gain_bias, self.init_method = gain_weight, gain_bias, init_method
        self.init_weight_bias()

    def init_weight_bias(self) -> None:
        """Draw new start values."""
        inputs, outputs = self.input_size, self.output_size
        self._draw((outputs, inputs), (outputs,), inputs, outputs)

    def fixed_input(self) -> int | None:
        """`input_size`."""
        return self.input_size

    def plan(self, shape: Shape | None) -> Shape | None:
        """Any shape of `input_size` numbers is flattened."""
        if shape is not None:
            self._check_size(shape, self.input_size)
        return (self.output_size,)

    def forward(self, x: Moments) -> Moments:
        """`mu = mw m + mb`; `var = (mw^2 + vw) v + vw m^2 + vb`, grouped as below."""
        p = self._live
        mean_b, var_b = (p.mean_b, p.var_b) if self.bias else (None, None)
        x = x.reshaped(-1 if x.mean.numel() else 0, self.input_size)
        square = x.mean * x.mean
        mean = F.linear(x.mean, p.mean_w, mean_b)
        if x.var is None:
            var, weight_square = F.linear(square, p.var_w, var_b), None
        else:
            weight_square = p.mean_w * p.mean_w
            var = F.linear(square + x.var, p.var_w, var_b)
            var.addmm_(x.var, weight_square.t())
        self._remember(x.mean, square, x.slope, weight_square)
        return Moments(mean, var)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Sum over the batch for the parameters; `mw^T dm`, `(mw^2)^T dv` for the input."""
        p = self._live
        mean, square, slope, weight_square = self._memory
        delta = delta.reshaped(mean.shape[0], self.output_size)
        torch.mm(delta.mean.t(), mean, out=p.delta_mean_w)
        torch.mm(delta.var.t(), square, out=p.delta_var_w)
        if self.bias:
            torch.sum(delta.mean, 0, out=p.delta_mean_b)
            torch.sum(delta.var, 0, out=p.delta_var_b)
        if not to_input:
            return None
        if weight_square is None:
            weight_square = p.mean_w * p.mean_w
        return Delta(delta.mean @ p.mean_w, delta.var @ weight_square).through_(slope)


class SLinear(Linear):
    """`Linear` behind an `SLSTM`; the smoother gives it the smoothed hidden units."""

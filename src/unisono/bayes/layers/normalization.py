"""`BatchNorm2d`, `LayerNorm` and `RMSNorm` with Gaussian gains.

All three scale by statistics that are taken as constants, so they share one pair of formulas: with
`x = (m - M) / sqrt(d)`, `mu = x mw + mb` and `var = v (mw^2 + vw) / d + vw x^2 + vb`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.bayes.layers.base import BaseLayer, Shape, check_sizes
from unisono.bayes.moments import Delta, Moments, check_count
from unisono.errors import PartitionError


class _Norm(BaseLayer):
    """Gains, and the formulas once the statistics are known."""

    keeps_shape = True

    def __init__(self, features: int, eps: float, bias: bool, gains: tuple[float, float]) -> None:
        super().__init__()
        check_sizes(self, features=features)
        self.num_features = self.piece = features
        self.eps, self.bias = eps, bias
        self.gain_weight, self.gain_bias = gains
        self.init_weight_bias()

    def init_weight_bias(self) -> None:
        """Set the start values: gain 1, bias 0."""
        n = self.num_features
        mean_b = torch.zeros(n) if self.bias else None
        var_b = torch.full((n,), self.gain_bias**2 / n) if self.bias else None
        self._start_from(torch.ones(n), torch.full((n,), self.gain_weight**2 / n), mean_b, var_b)

    def _scaled(
        self, x: Moments, centred: Tensor, inverse: Tensor, dims: tuple[int, ...]
    ) -> Moments:
        """Apply the gains.

        Args:
            x: the input.
            centred: its means minus the group's.
            inverse: `1 / sqrt(d)`, broadcast against `centred`.
            dims: of `centred`, those that the gains do not have.
        """
        p = self._live
        shape = [1 if dim in dims else n for dim, n in enumerate(centred.shape)]
        gain, gain_var = p.mean_w.view(shape), p.var_w.view(shape)
        unit = centred * inverse
        mean = unit * gain
        var = unit * unit * gain_var
        if x.var is not None:
            var = var + x.var * (gain * gain + gain_var) * (inverse * inverse)
        if self.bias:
            mean, var = mean + p.mean_b.view(shape), var + p.var_b.view(shape)
        self._remember(unit, inverse, x.slope, dims, shape)
        return Moments(mean, var)

    def _checked_shape(self, shape: Sequence[int], kinds: dict[int, str]) -> list[int]:
        """Return the shape to normalise over; refuse one that is not of these numbers of dims."""
        if len(shape) not in kinds:
            raise PartitionError.because(
                f"{self.get_layer_name()}({list(shape)})",
                f"{len(shape)} dims",
                f"a shape has {', or '.join(kinds.values())}",
                f"{self.get_layer_name()}([{math.prod(shape)}])",
            )
        return list(shape)

    def plan(self, shape: Shape | None) -> Shape | None:
        """A sample is a whole number of pieces of `num_features`."""
        size, group = 0 if shape is None else math.prod(shape), self.num_features
        if size % group:
            name = self.get_layer_name()
            raise PartitionError.because(
                f"{name}([{group}]) takes {group} numbers together",
                f"samples of {size} numbers",
                f"{size} = {size // group}*{group} + {size % group}",
                f"{name}([{size}])",
            )
        return self._set_shapes(shape, shape)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Sum over the groups for the gains; scale back for the input."""
        p = self._live
        unit, inverse, slope, dims, shape = self._memory
        sample, delta = delta.mean.shape, delta.reshaped(*unit.shape)
        p.delta_mean_w.copy_((unit * delta.mean).sum(dims).view(-1))
        p.delta_var_w.copy_((unit * unit * delta.var).sum(dims).view(-1))
        if self.bias:
            p.delta_mean_b.copy_(delta.mean.sum(dims).view(-1))
            p.delta_var_b.copy_(delta.var.sum(dims).view(-1))
        if not to_input:
            return None
        factor = p.mean_w.view(shape) * inverse
        back = Delta(delta.mean * factor, delta.var * factor * factor).through_(slope)
        return back.reshaped(*sample)


class BatchNorm2d(_Norm):
    """Normalise each feature (flat input) or channel (images) over the batch.

    Args:
        num_features: features or channels.
        eps: added to the variance.
        momentum: share of the old running value; the first training batch is copied.
        bias: whether to add a bias.
        gain_weight: factor on the start standard deviation of gains.
        gain_bias: factor on the start standard deviation of biases.

    In eval mode the running values are used.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        bias: bool = True,
        gain_weight: float = 1.0,
        gain_bias: float = 1.0,
    ) -> None:
        super().__init__(num_features, eps, bias, (gain_weight, gain_bias))
        self.momentum = momentum
        self.running_mean, self.running_var = torch.zeros(num_features), torch.ones(num_features)
        self.batch_mean, self.batch_var = torch.zeros(num_features), torch.ones(num_features)
        self.has_statistics = False
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        """Set by data-parallel training that shares batch statistics."""

    def move(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move the running values too."""
        super().move(device, dtype)
        for name in ("running_mean", "running_var", "batch_mean", "batch_var"):
            setattr(self, name, getattr(self, name).to(device=device, dtype=dtype))

    def __getstate__(self) -> dict[str, Any]:
        """Copies are plain layers: only the net of a data-parallel run talks to ranks."""
        return {**vars(self), "sum_over_ranks": None}

    def note_loaded_statistics(self) -> None:
        """Tell, after running values were written, whether they stem from data."""
        untouched = bool((self.running_mean == 0).all() and (self.running_var == 1).all())
        self.has_statistics = not untouched

    def plan(self, shape: Shape | None) -> Shape | None:
        """The first dim of a sample is the one with `num_features` entries."""
        if shape is not None:
            asked = f"BatchNorm2d({self.num_features}) of samples of shape {tuple(shape)}"
            check_count(asked, shape[0], self.num_features, f"BatchNorm2d({shape[0]})")
        return self._set_shapes(shape, shape)

    def forward(self, x: Moments) -> Moments:
        """Normalise; in training by the batch, and the running values follow."""
        shape = x.mean.shape
        batch = shape[0]
        inner = x.mean.numel() // (batch * self.num_features) if batch else 1
        x = x.reshaped(batch, self.num_features, inner)
        if self.training:
            self._observe(x)
            mean, var = self.batch_mean, self.batch_var
        else:
            mean, var = self.running_mean, self.running_var
        centred = x.mean - mean.view(1, -1, 1)
        inverse = (var + self.eps).rsqrt().view(1, -1, 1)
        return self._scaled(x, centred, inverse, (0, 2)).reshaped(*shape)

    def _observe(self, x: Moments) -> None:
        """Take the statistics of this batch, over all ranks if asked to."""
        together = self.sum_over_ranks or (lambda t: t)
        sums, n = x.mean.sum((0, 2)), float(x.mean.shape[0] * x.mean.shape[2])
        if self.sum_over_ranks is not None:
            *_, n_all = sums = together(torch.cat([sums, sums.new_tensor([n])]))
            sums, n = sums[:-1], float(n_all)
        if n == 0:
            return
        mean = sums / n
        squares = (x.mean - mean.view(1, -1, 1)).square_().sum((0, 2))
        if x.var is not None:
            squares = squares + x.var.sum((0, 2))
        var = together(squares) / max(n - 1, 1)
        self.batch_mean, self.batch_var = mean, var
        keep = self.momentum if self.has_statistics else 0.0
        self.running_mean = self.running_mean * keep + mean * (1 - keep)
        self.running_var = self.running_var * keep + var * (1 - keep)
        self.has_statistics = True


class LayerNorm(_Norm):
    """Normalise each sample over all its features; the same in training and eval.

    Args:
        normalized_shape: `[features]`, with a gain per feature, or `[channels, width, height]`,
            with a gain per channel. A sample of several times `features` (a sequence) is
            normalised piece by piece.
        eps: added to the variance.
        bias: whether to add a bias.
    """

    def __init__(
        self, normalized_shape: Sequence[int], eps: float = 1e-4, bias: bool = True
    ) -> None:
        kinds = {1: "1 dim, [features]", 3: "3, [channels, width, height]"}
        self.normalized_shape = self._checked_shape(normalized_shape, kinds)
        for size in self.normalized_shape[1:]:
            check_sizes(self, side=size)
        super().__init__(self.normalized_shape[0], eps, bias, (1.0, 1.0))

    def fixed_input(self) -> int | None:
        """All of `[channels, width, height]`; a sequence may have any number of pieces."""
        return math.prod(self.normalized_shape) if len(self.normalized_shape) == 3 else None

    def plan(self, shape: Shape | None) -> Shape | None:
        """An image is the one that was named; any other sample is of whole pieces."""
        own = self.normalized_shape
        if len(own) == 1:
            return super().plan(shape)
        shape = shape or (own[0], own[2], own[1])
        self._check_image(shape)
        return self._set_shapes(shape, shape)

    def _check_image(self, shape: Shape) -> None:
        """Refuse images of other channels or another number of pixels."""
        channels, width, height = self.normalized_shape
        size, wanted = math.prod(shape), channels * width * height
        found, fitting = f"a sample of {size} numbers", [size]
        if len(shape) == 3:
            found = f"an image of {shape[0]} channels, {shape[2]} wide, {shape[1]} high"
            fitting = [shape[0], shape[2], shape[1]]
        if size != wanted:
            wrong = f"{size} != {channels} * {width} * {height} = {wanted}"
        elif len(shape) == 3 and shape[0] != channels:
            wrong = f"{shape[0]} != {channels}"
        else:
            return
        raise PartitionError.because(
            f"LayerNorm({self.normalized_shape}): {channels} channels, {width} wide, {height} high",
            found,
            wrong,
            f"LayerNorm({fitting})",
        )

    def forward(self, x: Moments) -> Moments:
        """Normalise."""
        shape = x.mean.shape
        group = math.prod(self.normalized_shape)
        inner = group // self.num_features
        x = x.reshaped(x.mean.numel() // group, self.num_features, inner)
        mean = x.mean.mean((1, 2), keepdim=True)
        centred = x.mean - mean
        squares = (centred * centred).sum((1, 2), keepdim=True)
        if x.var is not None:
            squares = squares + x.var.sum((1, 2), keepdim=True)
        var = squares / max(group - 1, 1)
        return self._scaled(x, centred, (var + self.eps).rsqrt(), (0, 2)).reshaped(*shape)


class RMSNorm(_Norm):
    """Divide each sample by the root of its mean square; no bias.

    Args:
        normalized_shape: `[features]`; a sample of several times `features` (a sequence) is
            normalised piece by piece.
        eps: added to the mean square.
    """

    def __init__(self, normalized_shape: Sequence[int], eps: float = 1e-6) -> None:
        self.normalized_shape = self._checked_shape(normalized_shape, {1: "1 dim, [features]"})
        super().__init__(self.normalized_shape[0], eps, False, (1.0, 1.0))

    def forward(self, x: Moments) -> Moments:
        """Normalise."""
        shape = x.mean.shape
        x = x.reshaped(x.mean.numel() // self.num_features, self.num_features)
        square = (x.mean * x.mean).mean(1, keepdim=True)
        return self._scaled(x, x.mean, (square + self.eps).rsqrt(), (0,)).reshaped(*shape)

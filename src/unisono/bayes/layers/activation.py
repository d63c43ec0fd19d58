"""The activations: moments of a function of Gaussian units.

`_moments` maps mean and variance to mean, variance and slope, which is `Cov(z, a) / Var(z)`. An
activation has nothing to learn: it passes its slope on, times the slope it received, and the next
layer with units multiplies that into what it sends back.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from unisono.bayes.layers.base import BaseLayer, Shape
from unisono.bayes.moments import Delta, Moments
from unisono.errors import PartitionError

Activated = tuple[Tensor, Tensor, Tensor]

LEAST = 1e-6
"""Smallest mean and variance that an exact moment is given."""
_TINY = 1e-12
_LARGEST_LOG = 40.0
"""Variance of a logarithm above which log-normal moments would leave float32."""
_FLAT = 1e4
"""Variance above which a density is flat between -1 and 1, to float32."""
_ROOT_TWO_PI = math.sqrt(2 * math.pi)


def normal_pdf(x: Tensor) -> Tensor:
    """Return the standard normal density."""
    return torch.exp(-0.5 * x * x) / _ROOT_TWO_PI


class Activation(BaseLayer):
    """Base of the activations: one function of mean and variance, element by element."""

    is_activation = True
    keeps_shape = True
    keeps_certainty = True
    """Whether certain values stay certain (first-order formulas have var = slope^2 * var)."""
    by_row = False
    """Whether the units of a sample depend on each other."""

    @staticmethod
    @abstractmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        """Return mean, variance and slope of the units behind the function."""

    def plan(self, shape: Shape | None) -> Shape | None:
        """Output and input have the same shape."""
        return self._set_shapes(shape, shape)

    def forward(self, x: Moments) -> Moments:
        """Apply the function; compose its slope with that of the activation before."""
        shape = x.mean.shape
        if self.by_row:
            x = x.reshaped(shape[0], math.prod(shape[1:]))
        mean, var, slope = self._moments(x.mean, x.spread())
        certain = x.var is None and self.keeps_certainty
        if x.slope is not None:
            slope = slope * x.slope
        return Moments(mean, None if certain else var, slope).reshaped(*shape)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Return the delta as it is: the layer above has multiplied the slope in."""
        return delta if to_input else None


class ReLU(Activation):
    """`max(0, z)`, first order."""

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        slope = (mean > 0).to(mean.dtype)
        return mean.clamp_min(0), slope * var, slope


class Sigmoid(Activation):
    """Logistic function, first order."""

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        value = torch.sigmoid(mean)
        slope = value * (1 - value)
        return value, slope * slope * var, slope


class Tanh(Activation):
    """Hyperbolic tangent, first order."""

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        value = torch.tanh(mean)
        slope = 1 - value * value
        return value, slope * slope * var, slope


class Softplus(Activation):
    """`log(1 + exp(z))`, first order."""

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        slope = torch.sigmoid(mean)
        return torch.nn.functional.softplus(mean), slope * slope * var, slope


class LeakyReLU(Activation):
    """`z` above zero, `0.1 z` below, first order."""

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        slope = torch.where(mean > 0, 1.0, 0.1).to(mean.dtype)
        return slope * mean, slope * slope * var, slope


def _rectified(mean: Tensor, var: Tensor) -> Activated:
    """Return the exact moments of `max(0, z)`."""
    s = var.sqrt()
    a = mean / s.clamp_min(_TINY)
    cdf, pdf = torch.special.ndtr(a), normal_pdf(a)
    # the variance E[z+^2] - E[z+]^2 in units of s, written so that nothing large cancels
    far = a.abs().clamp_max(100.0)
    beyond = pdf - far * torch.special.ndtr(-far)
    return mean * cdf + s * pdf, var * (cdf - beyond * (far + beyond)), cdf


class MixtureReLU(Activation):
    """`max(0, z)`, exact moments."""

    keeps_certainty = False

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        t, second, slope = _rectified(mean, var)
        return t.clamp_min(LEAST), second.clamp_min(LEAST), slope


class MixtureTanh(Activation):
    """`z` cut at -1 and 1, exact moments."""

    keeps_certainty = False

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        # z or -z, whichever is below zero: -1 plus what is above -1, less what is above 1
        below = -mean.abs()
        low, low_var, above = _rectified(below + 1, var)
        high, high_var, beyond = _rectified(below - 1, var)
        t, slope = low - high - 1, above - beyond
        second = low_var - high_var - 2 * high * (1 - t)
        # a density that is flat between the cuts, where the others would cancel
        is_flat = var > _FLAT
        t = torch.where(is_flat, above + beyond - 1, t)
        second = torch.where(is_flat, 1 - t * t - slope * (2 / 3), second)
        return torch.where(mean > 0, -t, t), second.clamp_min(LEAST), slope


class MixtureSigmoid(Activation):
    """`(z + 1) / 2` cut at 0 and 1, exact moments."""

    keeps_certainty = False

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        t, second, slope = MixtureTanh._moments(mean, var)
        return t / 2 + 0.5, second / 4, slope / 2


class Softmax(Activation):
    """Softmax of a sample's units, first order."""

    by_row = True

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        p = torch.softmax(mean, -1)
        weighted = p * p * var
        others = weighted.sum(-1, keepdim=True) - weighted
        slope = p * (1 - p)
        return p, p * p * ((1 - p) ** 2 * var + others), slope


class Remax(Activation):
    """Rectified units divided by their sum over the sample, log-normal moments."""

    by_row = True
    keeps_certainty = False

    @staticmethod
    def _moments(mean: Tensor, var: Tensor, allowed: Tensor | None = None) -> Activated:
        """Rectified units divided by their sum along the last dim, with log-normal moments.

        `allowed` (broadcast against `mean`) marks the entries that count; the others are exactly 0
        and have no slope.
        """
        m, v, cdf = MixtureReLU._moments(mean, var)
        if allowed is not None:
            m, v = m * allowed, v * allowed
        total, total_var = m.sum(-1, keepdim=True), v.sum(-1, keepdim=True)
        if allowed is not None:  # harmless numbers where the result is dropped
            m, v = torch.where(allowed, m, 1.0), torch.where(allowed, v, 1.0)
        log_var = torch.log1p(v / (m * m))
        log_mean = m.log() - log_var / 2
        sum_log_var = torch.log1p(total_var / (total * total))
        sum_log_mean = total.log() - sum_log_var / 2
        cov = torch.log1p(v / (m * total))
        share_var = (log_var + sum_log_var - 2 * cov).clamp_min(0)  # but for rounding, it is
        a = torch.exp(log_mean - sum_log_mean + share_var / 2).clamp_min(LEAST)
        if allowed is not None:
            a = a * allowed
        a = a / a.sum(-1, keepdim=True)
        out_var = torch.expm1(share_var) * a * a
        covariance = torch.expm1(log_var - cov) * a * m / cdf.clamp_min(1e-30)
        wide = var.clamp_min(_TINY)
        slope = torch.minimum((out_var * var).clamp_min(0).sqrt(), covariance) / wide
        return (a, out_var, slope) if allowed is None else (a, out_var, slope * allowed)


class ClosedFormSoftmax(Activation):
    """Exponentiated units divided by their sum over the sample, log-normal moments."""

    by_row = True

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        v = var.clamp_max(_LARGEST_LOG)
        logs = mean + v / 2
        top = logs.amax(-1, keepdim=True)
        share = torch.exp(logs - top)
        total = share.sum(-1, keepdim=True)
        share = share / total
        grown = torch.expm1(v)
        sum_log_var = torch.log1p((share * share * grown).sum(-1, keepdim=True))
        sum_log_mean = top + total.log() - sum_log_var / 2
        cov = torch.log1p(share * grown)
        log_var = (v + sum_log_var - 2 * cov).clamp_min(0)  # but for rounding, it is
        a = torch.exp(mean - sum_log_mean + log_var / 2)
        part = torch.where(
            v > _TINY, (v - cov) / v.clamp_min(_TINY), 1 - share
        )  # its limit at v = 0
        return a, torch.expm1(log_var) * a * a, a * part


class EvenExp(Activation):
    """Units in pairs: the first as it is, the second exponentiated.

    Made for heteroscedastic noise: a mean, and a variance that must be positive.
    """

    by_row = True

    @staticmethod
    def _moments(mean: Tensor, var: Tensor) -> Activated:
        m, v = mean[..., 1::2], var[..., 1::2]
        value = torch.exp(m + v / 2)
        out_mean, out_var, slope = mean.clone(), var.clone(), torch.ones_like(mean)
        out_mean[..., 1::2] = value
        # value^2 (e^v - 1), whose factors may leave the range of floats where it does not
        out_var[..., 1::2] = torch.exp(2 * (m + v) + torch.log(-torch.expm1(-v)))
        slope[..., 1::2] = value
        return out_mean, out_var, slope

    def plan(self, shape: Shape | None) -> Shape | None:
        """The number of units must be even."""
        n = 0 if shape is None else math.prod(shape)
        if n % 2:
            raise PartitionError.because(
                "EvenExp reads pairs of units",
                f"{n} units",
                f"{n} % 2 = 1",
                f"{n + 1} outputs in the layer before: a mean and a noise variance for each target",
            )
        return super().plan(shape)

"""The activations as layers. Their formulas are in `activation_moments`.

An activation has nothing to learn: it passes its slope on, times the slope it received, and
the next layer with units multiplies that into what it sends back.
"""

from __future__ import annotations

import math
from abc import abstractmethod

from torch import Tensor

from unisono.bayes import activation_moments as moments
from unisono.bayes.base_layer import BaseLayer, Shape
from unisono.bayes.moments import Delta, Moments
from unisono.errors import PartitionError


class Activation(BaseLayer):
    """Base of the activations: one function of mean and variance, element by element."""

    is_activation = True
    keeps_shape = True
    keeps_certainty = True
    """Whether certain values stay certain (first-order formulas have var = slope^2 * var)."""
    by_row = False
    """Whether the units of a sample depend on each other."""

    def plan(self, shape: Shape | None) -> Shape | None:
        """Output and input have the same shape."""
        return self._set_shapes(shape, shape)

    def forward(self, x: Moments) -> Moments:
        """Apply the function; compose its slope with that of the activation before."""
        shape = x.mean.shape
        if self.by_row:
            x = Moments(*(None if t is None else t.flatten(1) for t in x))  # type: ignore[arg-type]
        mean, var, slope = self._activate(x.mean, x.spread())
        certain = x.var is None and self.keeps_certainty
        if x.slope is not None:
            slope = slope * x.slope
        return Moments(mean, None if certain else var, slope).reshaped(*shape)

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Return the delta as it is: the layer above has multiplied the slope in."""
        return delta if to_input else None

    @abstractmethod
    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        """Return mean, variance and slope."""


class ReLU(Activation):
    """`max(0, z)`, first order."""

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.relu(mean, var)


class Sigmoid(Activation):
    """Logistic function, first order."""

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.sigmoid(mean, var)


class Tanh(Activation):
    """Hyperbolic tangent, first order."""

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.tanh(mean, var)


class Softplus(Activation):
    """`log(1 + exp(z))`, first order."""

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.softplus(mean, var)


class LeakyReLU(Activation):
    """`z` above zero, `0.1 z` below, first order."""

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.leaky_relu(mean, var)


class MixtureReLU(Activation):
    """`max(0, z)`, exact moments."""

    keeps_certainty = False

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.mixture_relu(mean, var)


class MixtureTanh(Activation):
    """`z` cut at -1 and 1, exact moments."""

    keeps_certainty = False

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.mixture_tanh(mean, var)


class MixtureSigmoid(Activation):
    """`(z + 1) / 2` cut at 0 and 1, exact moments."""

    keeps_certainty = False

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.mixture_sigmoid(mean, var)


class Softmax(Activation):
    """Softmax of a sample's units, first order."""

    by_row = True

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.softmax(mean, var)


class Remax(Activation):
    """Rectified units divided by their sum over the sample, log-normal moments."""

    by_row = True
    keeps_certainty = False

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.remax(mean, var)


class ClosedFormSoftmax(Activation):
    """Exponentiated units divided by their sum over the sample, log-normal moments."""

    by_row = True

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.closed_form_softmax(mean, var)


class EvenExp(Activation):
    """Units in pairs: the first as it is, the second exponentiated.

    Made for heteroscedastic noise: a mean, and a variance that must be positive.
    """

    by_row = True

    def plan(self, shape: Shape | None) -> Shape | None:
        """The number of units must be even."""
        if shape is not None and math.prod(shape) % 2:
            n = math.prod(shape)
            raise PartitionError.because(
                "EvenExp reads pairs of units",
                f"{n} units",
                f"{n} % 2 = 1",
                f"{n + 1} outputs in the layer before: a mean and a noise variance for each target",
            )
        return super().plan(shape)

    def _activate(self, mean: Tensor, var: Tensor) -> moments.Activated:
        return moments.even_exp(mean, var)

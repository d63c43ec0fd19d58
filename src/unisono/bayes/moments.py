"""What travels through a net: Gaussian moments forward, deltas backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        return Moments(*(None if t is None else t.reshape(shape) for t in self))  # type: ignore[arg-type]

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

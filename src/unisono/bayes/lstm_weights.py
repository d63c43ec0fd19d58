"""Products of an LSTM's weights that a pass needs, made once a pass.

Everything here has features in rows and samples in columns, so that a gate is a contiguous block.
Deltas of variances go back through squares of sums over gates, `(sum_g K_g w_g)^2`. Written out
as products of pairs of gates they are one matrix product a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.bayes.moments import Moments
from unisono.bayes.parameters import Parameters

FIRST = (0, 0, 0, 1, 1, 2, 0, 1, 2, 3)
SECOND = (0, 1, 2, 1, 2, 2, 3, 3, 3, 3)
"""Pairs of gates f, i, c, o, each once: the six of the cell, then the four with o."""
SQUARES = (0, 3, 5, 9)
"""Which pairs are a gate with itself."""


class GateWeights:
    """Stacked gate weights `[4 H, width + H]`, split into columns of x and of h."""

    def __init__(self, p: Parameters, width: int) -> None:
        _, self.units, columns = p.mean_w.shape
        self.width, rows = width, 4 * self.units
        self._gates = p.mean_w
        self.mean, self.var = p.mean_w.view(rows, columns), p.var_w.view(rows, columns)
        self._bias = (p.mean_b, p.var_b) if p.mean_b.numel() else None
        f, i, c, o = p.mean_w.unbind(0)
        self._products = torch.cat([self.mean * self.mean, i * c, f * o, i * o, c * o])
        of_h = self._products[: 5 * self.units, width:]
        var_h = torch.cat([self.var[:, width:], torch.zeros_like(i[:, width:])])
        self._spread_h = torch.cat([of_h, var_h], 1)
        """For [vh, vh + h^2]: variances of gates, and the covariance of i and c."""

    def from_inputs(self, x: Moments) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gates' share of x for all samples and steps.

        Args:
            x: inputs with features in rows, `[width, n]`.

        Returns:
            Means `[4 H, n]`; variances with the covariance of i and c below, `[5 H, n]`;
            covariances of f, i, c with o, `[3 H, n]`, None where x is certain.
        """
        rows, width = 4 * self.units, self.width
        mean = self.mean[:, :width] @ x.mean
        square = x.mean * x.mean
        pairs = None
        if x.var is None:
            var = square.new_zeros(5 * self.units, square.shape[1])
        else:
            square += x.var
            products = self._products[:, :width] @ x.var
            var, pairs = products[: 5 * self.units], products[5 * self.units :]
        var[:rows].addmm_(self.var[:, :width], square)
        if self._bias is not None:
            mean += self._bias[0].view(-1, 1)
            var[:rows] += self._bias[1].view(-1, 1)
        return mean, var, pairs

    def with_hidden(
        self, mean: Tensor, var: Tensor, mean_h: Tensor, var_h: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gates of one step with the share of h added."""
        spread = torch.cat([var_h, torch.addcmul(var_h, mean_h, mean_h)])
        mean = torch.addmm(mean, self.mean[:, self.width :], mean_h)
        return mean, torch.addmm(var, self._spread_h, spread)

    def pairs(self) -> Tensor:
        """Return the products of pairs of gates' weights, transposed, `[width + H, 10 H]`."""
        twice = self.mean.new_tensor(
            [1.0 if a == b else 2.0 for a, b in zip(FIRST, SECOND, strict=True)]
        )
        products = self._gates[list(FIRST)] * self._gates[list(SECOND)] * twice.view(-1, 1, 1)
        return products.flatten(0, 1).t()

    def coupling(self, to_h: Tensor) -> Tensor:
        """Return `sum_g K_g w_g` over the columns of h for one sample.

        Args:
            to_h: derivatives of h by the gates, `[4, H]`.

        Returns:
            `[H units, H columns]`.
        """
        return (to_h.unsqueeze(-1) * self._gates[:, :, self.width :]).sum(0)

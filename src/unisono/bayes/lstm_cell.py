"""One time step of an LSTM: from the moments of its gates to the next state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """Hidden and cell units after a step, all of one shape."""

    mean_h: Tensor
    var_h: Tensor
    mean_c: Tensor
    var_c: Tensor

    def transposed(self) -> State:
        """Swap samples and units."""
        return State(*(part.t() for part in self))


class Slopes(NamedTuple):
    """Derivatives of a step, features in rows."""

    of_c: Tensor
    """Of the cell by gates f, i, c: `[3, H, B]`."""
    of_o: Tensor
    """Of h by gate o: `[H, B]`."""
    through_c: Tensor
    """Of h by the cell: `[H, B]`."""
    forget: Tensor
    """Mean of the forget gate: `[H, B]`."""


def step(z: Tensor, vz: Tensor, pairs: Tensor | None, before: State) -> tuple[State, Slopes]:
    """Return the state after a step and its derivatives.

    Args:
        z: means of gates f, i, c, o, `[4 H, B]`.
        vz: their variances, and below the covariance of i and c, `[5 H, B]`.
        pairs: covariances of f, i, c with o that come from x, `[3 H, B]`; None is zero.
        before: the state before, `[H, B]`.
    """
    units = z.shape[0] // 4
    z = z.view(4, units, z.shape[1])
    a = torch.sigmoid(z)
    a[2] = torch.tanh(z[2])
    square = a * a
    slope = a - square
    slope[2] = 1 - square[2]
    va = vz[: 4 * units].view(z.shape) * slope * slope
    f, i, g, o = a.unbind(0)
    vf, vi, vg, vo = va.unbind(0)
    _, slope_i, slope_g, slope_o = slope.unbind(0)
    second_f, second_i, _, second_o = (square + va).unbind(0)  # second moments
    mcp, vcp = before.mean_c, before.var_c
    cov = slope_i * slope_g * vz[4 * units :]
    ig = i * g
    c = torch.addcmul(ig + cov, f, mcp)
    vc = vcp * second_f
    vc.addcmul_(vf, mcp * mcp).addcmul_(vg, second_i).addcmul_(vi, square[2])
    vc.addcmul_(cov, torch.add(cov, ig, alpha=2))
    ca = torch.tanh(c)
    ca_square = ca * ca
    slope_c = 1 - ca_square
    of_c = slope[:3] * torch.stack([mcp, g, i])
    h = o * ca
    vh = (vc * slope_c).mul_(slope_c).mul_(second_o).addcmul_(vo, ca_square)
    if pairs is not None:
        cov = (pairs.view(of_c.shape) * of_c).sum(0) * slope_c * slope_o
        vh.addcmul_(cov, torch.add(cov, h, alpha=2))
        h = h + cov
    return State(h, vh, c, vc), Slopes(of_c, slope_o * ca, slope_c * o, f)

"""The steps of an `LSTM` forward in time, and back through it.

The four gates are stacked in the order forget, input, cell, output; each has weights
`[units, width + units]` with the columns of x before those of h. During a pass features are in
rows and samples in columns, so that a gate is a contiguous block.

Deltas of variances go back through squares of sums over gates, `(sum_g K_g w_g)^2`. Written out
as products of pairs of gates they are one matrix product per step.

A step of a small net is over before torch has been called for each of its operations. The compiled
core takes all steps in one call: `src/core/lstm.cpp`, which has the same formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.bayes.moments import Delta, Moments, to_array
from unisono.bayes.parameters import Parameters
from unisono.comm.engines import core

LARGEST = 64 * 128
"""Numbers of a gate's weights up to which the core is faster than torch's matrix products."""
FIRST = (0, 0, 0, 1, 1, 2, 0, 1, 2, 3)
SECOND = (0, 1, 2, 1, 2, 2, 3, 3, 3, 3)
"""Pairs of gates f, i, c, o, each once: the six of the cell, then the four with o."""
SQUARES = (0, 3, 5, 9)
"""Which pairs are a gate with itself."""


class State(NamedTuple):
    """Hidden and cell units after a step, all of one shape."""

    mean_h: Tensor
    var_h: Tensor
    mean_c: Tensor
    var_c: Tensor

    def transposed(self) -> State:
        """Swap samples and units."""
        return State(*(part.t() for part in self))

    def to(self, device: torch.device, dtype: torch.dtype | None) -> State:
        """Return the state on another device or in another dtype."""
        return State(*(part.to(device=device, dtype=dtype) for part in self))

    def conditioned(self, delta: Delta, through_c: Tensor) -> State:
        """Return the posterior, from the deltas of h and its derivative by the cell."""
        h, vh, c, vc = self
        mean, var = delta
        q = vc * through_c
        return State(h + vh * mean, (1 + var * vh) * vh, c + q * mean, vc + q * q * var)

    def lists(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Return mu_h, var_h, mu_c, var_c as flat lists."""
        h, vh, c, vc = (to_array(part).tolist() for part in self)
        return h, vh, c, vc


class Slopes(NamedTuple):
    """Derivatives of a step, features in rows; over T steps there is a dim T before the last."""

    gates: Tensor
    """Of the cell by gates f, i, c, and of h by gate o: `[4, H, B]`."""
    through_c: Tensor
    """Of h by the cell: `[H, B]`."""
    forget: Tensor
    """Mean of the forget gate: `[H, B]`."""


class Trail(NamedTuple):
    """What a forward pass over T steps leaves for the backward one; features in rows."""

    inputs: Tensor
    """Means of [x, h before], `[width + H, T, B]`."""
    slopes: Slopes


def forward(
    p: Parameters, x: Moments, steps: int, start: State | None, *, keep: bool
) -> tuple[Moments, State, Trail | None]:
    """Walk over the steps.

    Args:
        p: weights and biases of the gates.
        x: inputs, `[B, T * width]`.
        steps: T.
        start: state to start from; None is zero.
        keep: whether `backward` will follow.

    Returns:
        h of all steps, `[B, T * H]`; the last state, `[B, H]`; what `backward` needs, if `keep`.
    """
    if (compiled := _in_core(p)) is not None:
        return _forward_in_core(compiled.lstm_forward, p, x, steps, start, keep=keep)
    return _forward_in_torch(p, x, steps, start, keep=keep)


def backward(p: Parameters, trail: Trail, delta: Delta, *, to_input: bool) -> Delta | None:
    """Carry the correction of h of all steps back through time.

    Args:
        p: weights and biases of the gates; the sums of their deltas are written.
        trail: of the forward pass.
        delta: deltas of h, `[B, T * H]`.
        to_input: whether deltas of x are wanted.

    Returns:
        Deltas of x, `[B, T * width]`, if `to_input`.
    """
    if (compiled := _in_core(p)) is not None:
        run = compiled.lstm_backward
        gate_mean, gate_var, back = _backward_in_core(run, p, trail, delta, to_input=to_input)
    else:
        gate_mean, gate_var, back = _backward_in_torch(p, trail, delta, to_input=to_input)
    mean, var = (gates.flatten(2).flatten(0, 1) for gates in (gate_mean, gate_var))
    rows, columns = mean.shape[0], trail.inputs.shape[0]
    inputs = trail.inputs.flatten(1).t()
    torch.mm(mean, inputs, out=p.delta_mean_w.view(rows, columns))
    torch.mm(var, inputs.square(), out=p.delta_var_w.view(rows, columns))
    if p.mean_b.numel():
        torch.sum(mean, 1, out=p.delta_mean_b.view(rows))
        torch.sum(var, 1, out=p.delta_var_b.view(rows))
    return back


# In the core: addresses of tensors, in the order of the structs in src/core/lstm.hpp.


@functools.cache
def _core() -> Any | None:
    """Return the compiled core, None if there is none with these functions."""
    module = None if core.unavailable() else core.load()
    return module if hasattr(module, "lstm_forward") else None


def _in_core(p: Parameters) -> Any | None:
    """Return the core where it is there, and faster than torch."""
    is_small = p.mean_w[0].numel() <= LARGEST
    return _core() if is_small and p.mean_w.device.type == "cpu" else None


def _called(
    run: Callable[..., None],
    p: Parameters,
    batch: int,
    steps: int,
    tensors: Sequence[Tensor | None],
) -> None:
    _, units, columns = p.mean_w.shape
    at = tuple(None if t is None else t.data_ptr() for t in tensors)
    run(p.mean_w.dtype == torch.float64, batch, steps, columns - units, units, at)


def _forward_in_core(
    run: Callable[..., None],
    p: Parameters,
    x: Moments,
    steps: int,
    start: State | None,
    *,
    keep: bool,
) -> tuple[Moments, State, Trail | None]:
    batch, (_, units, columns) = x.mean.shape[0], p.mean_w.shape
    new = p.mean_w.new_empty
    mean, var = (None if t is None else t.contiguous() for t in x[:2])
    biases = (p.mean_b, p.var_b) if p.mean_b.numel() else (None, None)
    before = None if start is None else torch.stack(start).mT.contiguous()
    out = Moments(new(batch, steps * units), new(batch, steps * units))
    after = new(4, units, batch)
    inside, gates = (units, steps, batch), (4, units, steps, batch)
    trail = None
    if keep:
        trail = Trail(new(columns, steps, batch), Slopes(new(gates), new(inside), new(inside)))
    left = (None,) * 4 if trail is None else (trail.inputs, *trail.slopes)
    tensors = (p.mean_w, p.var_w, *biases, mean, var, before, out.mean, out.var, after, *left)
    _called(run, p, batch, steps, tensors)
    return out, State(*after.mT.unbind(0)), trail


def _backward_in_core(
    run: Callable[..., None], p: Parameters, trail: Trail, delta: Delta, *, to_input: bool
) -> tuple[Tensor, Tensor, Delta | None]:
    columns, steps, batch = trail.inputs.shape
    units, new = p.mean_w.shape[1], p.mean_w.new_empty
    gate_mean, gate_var = (torch.empty_like(trail.slopes.gates) for _ in range(2))
    width = steps * (columns - units)
    back = Delta(new(batch, width), new(batch, width)) if to_input else None
    given = (d.contiguous() for d in delta)
    tensors = (p.mean_w, *trail.slopes, *given, gate_mean, gate_var, *(back or (None, None)))
    _called(run, p, batch, steps, tensors)
    return gate_mean, gate_var, back


# In torch, a step at a time.


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
    gates = torch.empty_like(slope)
    of_c = torch.mul(slope[:3], torch.stack([mcp, g, i]), out=gates[:3])
    torch.mul(slope_o, ca, out=gates[3])
    h = o * ca
    vh = (vc * slope_c).mul_(slope_c).mul_(second_o).addcmul_(vo, ca_square)
    if pairs is not None:
        cov = (pairs.view(of_c.shape) * of_c).sum(0) * slope_c * slope_o
        vh.addcmul_(cov, torch.add(cov, h, alpha=2))
        h = h + cov
    return State(h, vh, c, vc), Slopes(gates, slope_c * o, f)


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


def _forward_in_torch(
    p: Parameters, x: Moments, steps: int, start: State | None, *, keep: bool
) -> tuple[Moments, State, Trail | None]:
    batch, (_, units, columns) = x.mean.shape[0], p.mean_w.shape
    width = columns - units
    inputs = _features_first(x.mean, steps, width)
    weights = GateWeights(p, width)
    var = None if x.var is None else _features_first(x.var, steps, width)
    z, vz, pairs = weights.from_inputs(Moments(inputs, var))
    zero = z.new_zeros(units, batch)
    now = State(zero, zero, zero, zero) if start is None else start.transposed()
    states, slopes = [now], []
    of_x = [part.view(len(part), steps, batch).unbind(1) for part in (z, vz)]
    pair_of: Sequence[Tensor | None] = [None] * steps
    if pairs is not None:
        pair_of = pairs.view(len(pairs), steps, batch).unbind(1)
    for gates, gate_var, pair in zip(*of_x, pair_of, strict=True):
        if len(states) > 1 or start is not None:
            gates, gate_var = weights.with_hidden(gates, gate_var, now.mean_h, now.var_h)
        now, derivatives = step(gates, gate_var, pair, now)
        states.append(now)
        slopes.append(derivatives)
    trail = None
    if keep:
        hidden = torch.stack([state.mean_h for state in states[:-1]], 1)
        trail = Trail(
            torch.cat([inputs.view(width, steps, batch), hidden]),
            Slopes(*(torch.stack(part, -2) for part in zip(*slopes, strict=True))),
        )
    mean = torch.stack([state.mean_h for state in states[1:]])
    variance = torch.stack([state.var_h for state in states[1:]])
    rows = (t.permute(2, 0, 1).reshape(batch, steps * units) for t in (mean, variance))
    return Moments(*rows), now.transposed(), trail


def _backward_in_torch(
    p: Parameters, trail: Trail, delta: Delta, *, to_input: bool
) -> tuple[Tensor, Tensor, Delta | None]:
    """Return the deltas of gates before their functions, `[4, H, T, B]`, and those of x.

    The gates f, i, c only act through the cell, so with `um = k H + fm`, `uv = k^2 HV + fv`
    their deltas are `slope * um` and `slope^2 * uv`; gate o has those of h itself.
    """
    slopes, through_c, forget = trail.slopes
    units, steps, batch = through_c.shape
    width = trail.inputs.shape[0] - units
    weights = GateWeights(p, width)
    mean_in, var_in = (_features_first(d, steps, units).view(units, steps, batch) for d in delta)
    pairs = weights.pairs()
    weights_h, pairs_h = weights.mean[:, width:].t(), pairs[width:]
    products = _pair_products(trail.slopes)
    gate_mean, pair_var = torch.empty_like(slopes), torch.empty_like(products)
    over_time = (
        mean_in, var_in, through_c, through_c.square(), forget, forget.square(),
        slopes, products, gate_mean, pair_var,
    )  # fmt: skip
    each_step = list(zip(*(whole.unbind(-2) for whole in over_time), strict=True))
    rm = rv = fm = fv = through_c.new_zeros(units, batch)
    for dm, dv, k, k2, f, f2, slope, product, gates, pair in reversed(each_step):
        hm, hv = dm + rm, dv + rv
        um, uv = torch.addcmul(fm, k, hm), torch.addcmul(fv, k2, hv)
        torch.mul(slope[:3], um, out=gates[:3])
        torch.mul(slope[3], hm, out=gates[3])
        torch.mul(product[:6], uv, out=pair[:6])
        torch.mul(product[6:], hv, out=pair[6:])
        rm = weights_h @ gates.view(4 * units, batch)
        rv = pairs_h @ pair.view(10 * units, batch)
        fm, fv = f * um, f2 * uv
    back = None
    if to_input:
        mean = weights.mean[:, :width].t() @ gate_mean.flatten(2).flatten(0, 1)
        var = pairs[:width] @ pair_var.flatten(2).flatten(0, 1)
        parts = (t.view(width, steps, batch).permute(2, 1, 0) for t in (mean, var))
        back = Delta(*(t.reshape(batch, steps * width) for t in parts))
    return gate_mean, pair_var[list(SQUARES)], back


def _features_first(x: Tensor, steps: int, width: int) -> Tensor:
    """Return `[batch, steps * width]` as `[width, steps * batch]`."""
    batch = x.shape[0]
    return x.reshape(batch, steps, width).permute(2, 1, 0).reshape(width, steps * batch)


def _pair_products(slopes: Slopes) -> Tensor:
    """Return the products of derivatives by pairs of gates, `[10, H, T, B]`.

    The six pairs of the cell lack the factor `k^2`, or the cell's own share: see `backward`.
    """
    cell, of_o = slopes.gates[:3], slopes.gates[3]
    products = cell.new_empty(10, *of_o.shape)
    torch.mul(cell, cell[0], out=products[:3])
    torch.mul(cell[1:], cell[1], out=products[3:5])
    torch.mul(cell[2], cell[2], out=products[5])
    torch.mul(cell, of_o * slopes.through_c, out=products[6:9])
    torch.mul(of_o, of_o, out=products[9])
    return products

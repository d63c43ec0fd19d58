"""`LSTM`: recurrent over the sequence, with backward through time.

The four gates are stacked in the order forget, input, cell, output; each has weights
`[output_size, input_size + output_size]` with the columns of x before those of h. During a pass
features are in rows and samples in columns, so that a gate is a contiguous block.

Deltas of variances go back through squares of sums over gates, `(sum_g K_g w_g)^2`. Written out
as products of pairs of gates they are one matrix product per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.bayes.layers.base import BaseLayer, Shape, check_sizes
from unisono.bayes.moments import ArrayLike, Delta, Moments, check_finite, to_array, to_tensor
from unisono.bayes.parameters import Parameters
from unisono.errors import PartitionError

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

    def coupling(self, to_h: Tensor) -> Tensor:
        """Return `sum_g K_g w_g` over the columns of h for one sample.

        Args:
            to_h: derivatives of h by the gates, `[4, H]`.

        Returns:
            `[H units, H columns]`.
        """
        return (to_h.unsqueeze(-1) * self._gates[:, :, self.width :]).sum(0)


class Trail(NamedTuple):
    """What a forward pass over T steps leaves for the backward one; features in rows."""

    inputs: Tensor
    """Means of [x, h before], `[width + H, T, B]`."""
    slopes: Slopes
    slope: Tensor | None
    """Of the activations before this layer."""
    before: State
    """State before the last step, `[B, H]`."""
    last: State
    """State after it."""


class LSTM(BaseLayer):
    """Long short-term memory; the output is h of all steps, flat `seq_len * output_size`.

    Args:
        input_size: numbers of one time step.
        output_size: hidden units.
        seq_len: time steps of a sample.
        bias: whether the gates have biases.
        gain_weight: factor on the start standard deviation of weights.
        gain_bias: factor on the start standard deviation of biases.
        init_method: `"He"` or `"Xavier"`.
        stateful: True carries the state from call to call, False starts every call at zero, None
            carries it in online use (one step, one sample per call).
    """

    info = "{name}({0.input_size},{0.output_size})"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        seq_len: int,
        bias: bool = True,
        gain_weight: float = 1.0,
        gain_bias: float = 1.0,
        init_method: str = "He",
        *,
        stateful: bool | None = None,
    ) -> None:
        super().__init__()
        check_sizes(self, input_size=input_size, output_size=output_size, seq_len=seq_len)
        self.input_size, self.output_size = input_size, output_size
        self.seq_len, self.bias = seq_len, bias
        self.gain_weight, self.gain_bias, self.init_method = gain_weight, gain_bias, init_method
        self.stateful = self._carrying(seq_len, stateful)
        self.state: State | None = None
        """State after the last step; its posterior once backward ran."""
        self._start: State | None = None
        self._carries_next = False
        self.init_weight_bias()

    def _carrying(self, seq_len: int, stateful: bool | None) -> bool | None:  # noqa: ARG002
        """Return whether states go from call to call, as it was asked for."""
        return stateful

    def init_weight_bias(self) -> None:
        """Draw new start values."""
        columns = self.input_size + self.output_size
        shape = (4, self.output_size, columns)
        self._draw(shape, shape[:2], columns, self.output_size)

    def fixed_input(self) -> int | None:
        """All steps."""
        return self.seq_len * self.input_size

    def plan(self, shape: Shape | None) -> Shape | None:
        """A sample is `seq_len` steps of `input_size` numbers."""
        if shape is not None:
            self._check_size(shape, self.seq_len * self.input_size)
        return (self.seq_len * self.output_size,)

    def get_max_num_states(self) -> int:
        """Return the larger of the numbers of input and output units over all steps."""
        return self.seq_len * super().get_max_num_states()

    def move(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move the state too."""
        super().move(device, dtype)
        self.state = None if self.state is None else self.state.to(device, dtype)
        self._start = None if self._start is None else self._start.to(device, dtype)

    @property
    def carried(self) -> State | None:
        """What the next call of the same batch size starts from; None is zero."""
        return self.state if self._start is None and self._carries_next else self._start

    def reset_state(self) -> None:
        """Let the next call start at zero."""
        self.state = self._start = None

    def set_state(self, state: State) -> None:
        """Let the next call start here."""
        self.state = self._start = state

    def read_state(self, parts: Sequence[ArrayLike], place: object) -> State:
        """Return a state that a user gave: mu_h, var_h, mu_c, var_c of any batch, flat.

        Args:
            parts: the four, as lists or arrays.
            place: of this layer in its net, for messages.
        """
        like, units = self._live.mean_w, self.output_size
        rows = [to_tensor(part, like.device, like.dtype).reshape(-1) for part in parts]
        sizes = [row.numel() for row in rows]
        if len(rows) != 4 or len(set(sizes)) != 1 or sizes[0] % units:
            raise PartitionError.because(
                f"the state of layer {place}, {self.get_layer_info()}",
                f"parts of {sizes} numbers",
                f"four parts of batch*{units}",
                "(mu_h, var_h, mu_c, var_c) as get_lstm_states() gives them",
            )
        for name, row in zip(("mu_h", "var_h", "mu_c", "var_c"), rows, strict=True):
            # variances may be negative: the posterior of several observations can be
            check_finite(row, f"{name} of layer {place}", "states as get_lstm_states() gives them")
        # units in rows, as a layer leaves its state: products then round alike
        return State(*(row.view(-1, units).t().contiguous().t() for row in rows))

    def _carries(self, batch: int) -> bool:
        """Whether the state goes from call to call."""
        if self.stateful is None:
            return self.seq_len == 1 and batch == 1
        return self.stateful

    def _first_state(self, batch: int) -> State | None:
        """Return the state to start from; None is zero."""
        start = self._start
        self._start = None
        if start is None and self._carries(batch):
            start = self.state
        if start is None or start.mean_h.shape[0] == batch:
            return start
        if self.stateful and self._carries_next:
            held = start.mean_h.shape[0]
            raise PartitionError.because(
                f"{self.get_layer_info()} with stateful=True on {batch} samples",
                f"it carries the state of {held}",
                f"{batch} != {held}",
                "net.reset_lstm_states() before a batch of another size",
            )
        return None

    def forward(self, x: Moments) -> Moments:
        """Walk over the steps."""
        steps, units, width = self.seq_len, self.output_size, self.input_size
        batch, slope = x.mean.shape[0], x.slope
        rows = [None if t is None else _features_first(t, steps, width) for t in x[:2]]
        weights = GateWeights(self._live, width)
        z, vz, pairs = weights.from_inputs(Moments(*rows))  # type: ignore[arg-type]
        start = self._first_state(batch)
        zero = z.new_zeros(units, batch)
        now = State(zero, zero, zero, zero) if start is None else start.transposed()
        before = now
        states, slopes = [now], []
        of_x = [part.view(len(part), steps, batch).unbind(1) for part in (z, vz)]
        pair_of: Sequence[Tensor | None] = [None] * steps
        if pairs is not None:
            pair_of = pairs.view(len(pairs), steps, batch).unbind(1)
        for gates, gate_var, pair in zip(*of_x, pair_of, strict=True):
            if len(states) > 1 or start is not None:
                gates, gate_var = weights.with_hidden(gates, gate_var, now.mean_h, now.var_h)
            before = now
            now, derivatives = step(gates, gate_var, pair, before)
            states.append(now)
            slopes.append(derivatives)
        self.state, self._carries_next = now.transposed(), self._carries(batch)
        self._memory = None
        if self.training:
            hidden = torch.stack([state.mean_h for state in states[:-1]], 1)
            trail = Trail(
                torch.cat([rows[0].view(width, steps, batch), hidden]),  # type: ignore[union-attr]
                Slopes(*(torch.stack(part, -2) for part in zip(*slopes, strict=True))),
                slope,
                before.transposed(),
                self.state,
            )
            self._memory = (trail, weights)
        mean = torch.stack([state.mean_h for state in states[1:]])
        var = torch.stack([state.var_h for state in states[1:]])
        return Moments(*(t.permute(2, 0, 1).reshape(batch, steps * units) for t in (mean, var)))

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Carry the correction back through time.

        The gates f, i, c only act through the cell, so with `um = k H + fm`, `uv = k^2 HV + fv`
        their deltas are `slope * um` and `slope^2 * uv`; gate o has those of h itself.
        """
        trail, weights = self._memory
        slopes, through_c, forget = trail.slopes
        units, steps, batch = through_c.shape
        mean_in, var_in = (
            _features_first(d, steps, units).view(units, steps, batch) for d in delta
        )
        pairs = weights.pairs()
        weights_h, pairs_h = weights.mean[:, self.input_size :].t(), pairs[self.input_size :]
        products = _pair_products(trail.slopes)
        gate_mean, pair_var = torch.empty_like(slopes), torch.empty_like(products)
        over_time = (
            mean_in, var_in, through_c, through_c.square(), forget, forget.square(),
            slopes, products, gate_mean, pair_var,
        )  # fmt: skip
        each_step = list(zip(*(whole.unbind(-2) for whole in over_time), strict=True))
        rm = rv = fm = fv = through_c.new_zeros(units, batch)
        for t in reversed(range(steps)):
            dm, dv, k, k2, f, f2, slope, product, gates, pair = each_step[t]
            hm, hv = dm + rm, dv + rv
            if t == steps - 1 and self._carries_next:
                self._condition(trail, hm.t(), hv.t())
            um, uv = torch.addcmul(fm, k, hm), torch.addcmul(fv, k2, hv)
            torch.mul(slope[:3], um, out=gates[:3])
            torch.mul(slope[3], hm, out=gates[3])
            torch.mul(product[:6], uv, out=pair[:6])
            torch.mul(product[6:], hv, out=pair[6:])
            if t:
                rm = weights_h @ gates.view(4 * units, batch)
                rv = pairs_h @ pair.view(10 * units, batch)
                fm, fv = f * um, f2 * uv
        self._sum_parameters(trail, gate_mean, pair_var[list(SQUARES)])
        if not to_input:
            return None
        mean = weights.mean[:, : self.input_size].t() @ gate_mean.flatten(2).flatten(0, 1)
        var = pairs[: self.input_size] @ pair_var.flatten(2).flatten(0, 1)
        shape = (self.input_size, steps, batch)
        back = Delta(*(t.view(shape).permute(2, 1, 0) for t in (mean, var)))
        return back.reshaped(batch, steps * self.input_size).through_(trail.slope)

    def _sum_parameters(self, trail: Trail, gate_mean: Tensor, gate_var: Tensor) -> None:
        p = self._live
        rows, columns = 4 * self.output_size, self.input_size + self.output_size
        mean, var = (gates.flatten(2).flatten(0, 1) for gates in (gate_mean, gate_var))
        inputs = trail.inputs.flatten(1).t()
        torch.mm(mean, inputs, out=p.delta_mean_w.view(rows, columns))
        torch.mm(var, inputs.square(), out=p.delta_var_w.view(rows, columns))
        if self.bias:
            torch.sum(mean, 1, out=p.delta_mean_b.view(rows))
            torch.sum(var, 1, out=p.delta_var_b.view(rows))

    def _condition(self, trail: Trail, mean: Tensor, var: Tensor) -> None:
        """Replace the carried state by its posterior."""
        h, vh, c, vc = trail.last
        q = vc * trail.slopes.through_c[:, -1].t()
        self.state = State(h + vh * mean, (1 + var * vh) * vh, c + q * mean, vc + q * q * var)


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

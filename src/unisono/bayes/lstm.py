"""`LSTM`: recurrent over the sequence, with backward through time.

The four gates are stacked in the order forget, input, cell, output; each has weights
`[output_size, input_size + output_size]` with the columns of x before those of h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.bayes.arrays import check_sizes
from unisono.bayes.base_layer import BaseLayer, Shape
from unisono.bayes.drawing import normal, start_scale
from unisono.bayes.lstm_cell import State, step
from unisono.bayes.lstm_weights import SQUARES, GateWeights
from unisono.bayes.moments import Delta, Moments
from unisono.errors import PartitionError


class Trail(NamedTuple):
    """What a forward pass over T steps leaves for the backward one; features in rows."""

    inputs: Tensor
    """Means of [x, h before], `[width + H, T, B]`."""
    slopes: Tensor
    """Derivatives of the cell by gates f, i, c and of h by gate o, `[4, H, T, B]`."""
    through_c: Tensor
    """Derivative of h by the cell, `[H, T, B]`."""
    forget: Tensor
    """Means of the forget gate, `[H, T, B]`."""
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
            carries it in online use (one step, one sample a call).
    """

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
        name = self.get_layer_name()
        check_sizes(name, input_size=input_size, output_size=output_size, seq_len=seq_len)
        self.input_size, self.output_size = input_size, output_size
        self.seq_len, self.bias = seq_len, bias
        self.gain_weight, self.gain_bias, self.init_method = gain_weight, gain_bias, init_method
        self.stateful = stateful
        self.state: State | None = None
        """State after the last step; its posterior once backward ran."""
        self._start: State | None = None
        self._carries_next = False
        self.init_weight_bias()

    def init_weight_bias(self) -> None:
        """Draw new start values."""
        columns = self.input_size + self.output_size
        scale = start_scale(self.init_method, columns, self.output_size)
        shape = (4, self.output_size, columns)
        mean_b = normal(shape[:2], scale) if self.bias else None
        self._own(
            normal(shape, scale),
            torch.full(shape, (self.gain_weight * scale) ** 2),
            mean_b,
            None if mean_b is None else torch.full_like(mean_b, (self.gain_bias * scale) ** 2),
        )

    def get_layer_info(self) -> str:
        """Return name and sizes of one step."""
        return f"{self.get_layer_name()}({self.input_size},{self.output_size})"

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
        for name in ("state", "_start"):
            state = getattr(self, name)
            if state is not None:
                setattr(self, name, State(*(t.to(device=device, dtype=dtype) for t in state)))

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
            of_c, of_o, through_c, forget = (
                torch.stack(part, -2) for part in zip(*slopes, strict=True)
            )
            hidden = torch.stack([state.mean_h for state in states[:-1]], 1)
            trail = Trail(
                torch.cat([rows[0].view(width, steps, batch), hidden]),  # type: ignore[union-attr]
                torch.cat([of_c, of_o.unsqueeze(0)]),
                through_c,
                forget,
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
        units, steps, batch = trail.through_c.shape
        mean_in, var_in = (
            _features_first(d, steps, units).view(units, steps, batch) for d in delta
        )
        pairs, through_square = weights.pairs(), trail.through_c.square()
        weights_h, pairs_h = weights.mean[:, self.input_size :].t(), pairs[self.input_size :]
        products, forget_square = _pair_products(trail), trail.forget.square()
        gate_mean, pair_var = torch.empty_like(trail.slopes), torch.empty_like(products)
        each_step = zip(
            *(
                whole.unbind(-2)
                for whole in (
                    mean_in,
                    var_in,
                    trail.through_c,
                    through_square,
                    trail.forget,
                    forget_square,
                    trail.slopes,
                    products,
                    gate_mean,
                    pair_var,
                )
            ),
            strict=True,
        )
        rm = rv = fm = fv = trail.through_c.new_zeros(units, batch)
        for t, (dm, dv, k, k2, f, f2, slope, product, gates, pair) in reversed(
            list(enumerate(each_step))
        ):
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
        q = vc * trail.through_c[:, -1].t()
        self.state = State(h + vh * mean, (1 + var * vh) * vh, c + q * mean, vc + q * q * var)


def _features_first(x: Tensor, steps: int, width: int) -> Tensor:
    """Return `[batch, steps * width]` as `[width, steps * batch]`."""
    batch = x.shape[0]
    return x.reshape(batch, steps, width).permute(2, 1, 0).reshape(width, steps * batch)


def _pair_products(trail: Trail) -> Tensor:
    """Return the products of derivatives by pairs of gates, `[10, H, T, B]`.

    The six pairs of the cell lack the factor `k^2`, or the cell's own share: see `backward`.
    """
    cell, of_o = trail.slopes[:3], trail.slopes[3]
    products = cell.new_empty(10, *of_o.shape)
    torch.mul(cell, cell[0], out=products[:3])
    torch.mul(cell[1:], cell[1], out=products[3:5])
    torch.mul(cell[2], cell[2], out=products[5])
    torch.mul(cell, of_o * trail.through_c, out=products[6:9])
    torch.mul(of_o, of_o, out=products[9])
    return products

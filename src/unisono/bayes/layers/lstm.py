"""`LSTM`: recurrent over the sequence. `SLSTM`: one whose whole history can be smoothed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.bayes.layers.base import BaseLayer, Shape, check_sizes
from unisono.bayes.layers.recurrence import State, backward, forward
from unisono.bayes.moments import ArrayLike, Delta, Moments, check_count, check_finite, to_tensor
from unisono.errors import PartitionError

FLOOR = 1e-5
"""Stands in for a variance that is not positive."""


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
        batch = x.mean.shape[0]
        start = self._first_state(batch)
        out, state, trail = forward(self._live, x, self.seq_len, start, keep=self.training)
        self.state, self._carries_next = state, self._carries(batch)
        self._remember(trail, x.slope, start, state)
        return out

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """Carry the correction back through time."""
        trail, slope, _, last = self._memory
        units, steps, batch = trail.slopes.through_c.shape
        delta = delta.reshaped(batch, steps * units)
        if self._carries_next:
            through_c = trail.slopes.through_c[:, -1].t()
            self.state = last.conditioned(Delta(*(d[:, -units:] for d in delta)), through_c)
        back = backward(self._live, trail, delta, to_input=to_input)
        return None if back is None else back.through_(slope)


class Step(NamedTuple):
    """One time step of training, as the smoother needs it; states are `[units]`."""

    prior: State
    posterior: State
    cov_c: Tensor
    """Covariance of the cell with the one before."""
    cov_h: Tensor
    """Covariance of h before (rows) with h now (columns)."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the step as four tensors, in the order of its fields."""
        return torch.stack(self.prior), torch.stack(self.posterior), self.cov_c, self.cov_h

    @classmethod
    def of(cls, prior: Tensor, posterior: Tensor, cov_c: Tensor, cov_h: Tensor) -> Step:
        """Return the step that `tensors` gave."""
        return cls(State(*prior), State(*posterior), cov_c, cov_h)


class SLSTM(LSTM):
    """An `LSTM` that sees one time step of one series per call and remembers all of them.

    Arguments as `LSTM`; `seq_len` is 1, and the state is always carried.
    """

    num_samples = 0
    """Steps allowed between two smoothings; 0 is any number."""

    def _carrying(self, seq_len: int, stateful: bool | None) -> bool:
        if seq_len != 1 or stateful is False:
            raise PartitionError.because(
                f"SLSTM with seq_len={seq_len}, stateful={stateful}",
                "it carries its state and takes one time step per call",
                f"{seq_len} != 1" if seq_len != 1 else None,
                "seq_len=1, or LSTM for whole sequences",
            )
        self.history: list[Step] = []
        self.smoothed: list[State] = []
        return True

    def move(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Move the history and the smoothed states too."""
        super().move(device, dtype)
        self.history = [
            Step.of(*(t.to(device=device, dtype=dtype) for t in step.tensors()))
            for step in self.history
        ]
        self.smoothed = [state.to(device, dtype) for state in self.smoothed]

    def snapshot(self) -> dict[str, Any]:
        """Return what a forward pass may change; of the history, which only grows, its length."""
        return {**super().snapshot(), "history": (self.history, len(self.history))}

    def put_back(self, values: dict[str, Any]) -> None:
        """Become what `snapshot` saw."""
        history, steps = values["history"]
        del history[steps:]
        super().put_back({**values, "history": history})

    def reset_state(self) -> None:
        """Let the next call start at zero, with an empty history."""
        super().reset_state()
        self.history = []

    def history_tensors(self) -> dict[str, Tensor]:
        """Return the history as tensors of `[steps, ...]`; empty ones where there is none."""
        nothing = [self._live.mean_w.new_empty(0)] * len(Step._fields)
        steps = [
            torch.stack(part) for part in zip(*(s.tensors() for s in self.history), strict=True)
        ]
        return dict(zip(Step._fields, steps or nothing, strict=True))

    def set_history(self, tensors: dict[str, Tensor]) -> None:
        """Take the history that `history_tensors` gave."""
        like = self._live.mean_w
        parts = (tensors[name].to(device=like.device, dtype=like.dtype) for name in Step._fields)
        self.history = [Step.of(*step) for step in zip(*parts, strict=True)]

    def forward(self, x: Moments) -> Moments:
        """One step; in training it is written down."""
        asked = f"{self.get_layer_info()}, which follows one series, on {x.mean.shape[0]} samples"
        hint = "a batch of 1, or LSTM(..., stateful=True) for several series"
        check_count(asked, x.mean.shape[0], 1, hint)
        if self.training and self.num_samples and len(self.history) >= self.num_samples:
            raise PartitionError.because(
                f"step {len(self.history) + 1} of {self.get_layer_info()}",
                f"num_samples = {self.num_samples}",
                f"{len(self.history) + 1} > {self.num_samples}",
                "net.smoother() after the last step, or net.num_samples = 0 for any number",
            )
        out = super().forward(x)
        if self.training:
            trail, _, before, last = self._memory
            prior = State(*(t[0] for t in last))
            gates, through_c, forget = (part[..., 0, 0] for part in trail.slopes)
            to_h = torch.cat([gates[:3] * through_c, gates[3:]])
            coupling = (to_h.unsqueeze(-1) * self._live.mean_w[:, :, self.input_size :]).sum(0)
            var_h, var_c = (before.var_h[0], before.var_c[0]) if before else (forget * 0,) * 2
            cov_h, cov_c = var_h.unsqueeze(1) * coupling.t(), var_c * forget
            self.history.append(Step(prior, prior, cov_c, cov_h))
        return out

    def backward(self, delta: Delta, *, to_input: bool) -> Delta | None:
        """As `LSTM`; the posterior is written down."""
        back = super().backward(delta, to_input=to_input)
        if self.state is not None and self.history:
            posterior = State(*(t[0] for t in self.state))
            self.history[-1] = self.history[-1]._replace(posterior=posterior)
        return back

    def smooth(self) -> Tensor:
        """Smooth the history into `smoothed`, clear it, and return h: `[2, T, units]`."""
        steps = self.history
        now = steps[-1].posterior
        smoothed = [now]
        for step, after in zip(reversed(steps[:-1]), reversed(steps[1:]), strict=True):
            prior = after.prior
            var_h, var_c = _positive(prior.var_h), _positive(prior.var_c)
            gain_h, gain_c = after.cov_h / var_h, after.cov_c / var_c
            post = step.posterior
            now = State(
                post.mean_h + gain_h @ (now.mean_h - prior.mean_h),
                _positive(post.var_h + gain_h.square() @ (now.var_h - var_h)),
                post.mean_c + gain_c * (now.mean_c - prior.mean_c),
                _positive(post.var_c + gain_c.square() * (now.var_c - var_c)),
            )
            smoothed.append(now)
        self.smoothed = smoothed[::-1]
        self.reset_state()
        return torch.stack([torch.stack([s.mean_h, s.var_h]) for s in self.smoothed], 1)

    def smoothed_state(self, step: int) -> State:
        """Return the smoothed state at a time step."""
        if step >= len(self.smoothed):
            raise PartitionError.because(
                f"the smoothed state at step {step}",
                f"{len(self.smoothed)} smoothed steps",
                f"{step} >= {len(self.smoothed)}",
                "net.smoother() first; steps count from 0",
            )
        return self.smoothed[step]


def _positive(var: Tensor) -> Tensor:
    return torch.where(var > 0, var, FLOOR)

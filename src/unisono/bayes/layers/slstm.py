"""`SLSTM`: a layer that can be smoothed, and the smoother's recursion."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.bayes.layers.lstm import LSTM, State
from unisono.bayes.moments import Delta, Moments, check_count
from unisono.errors import PartitionError

FLOOR = 1e-5
"""Stands in for a variance that is not positive."""


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
            trail, weights = self._memory
            prior = State(*(t[0] for t in trail.last))
            gates, through_c, forget = (part[..., -1, 0] for part in trail.slopes)
            coupling = weights.coupling(torch.cat([gates[:3] * through_c, gates[3:]]))
            cov_h = trail.before.var_h[0].unsqueeze(1) * coupling.t()
            cov_c = trail.before.var_c[0] * forget
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

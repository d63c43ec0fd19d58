"""`OutputUpdater`: condition the output of a net on observations."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.accelerator import is_accelerator
from unisono.bayes.moments import (
    ArrayLike,
    BaseDeltaStates,
    BaseHiddenStates,
    Delta,
    check_count,
    check_finite,
    check_variance,
    integers,
    to_tensor,
)
from unisono.errors import PartitionError


class OutputUpdater:
    """Writes the deltas of a net's output, given what was observed. Local.

    Args:
        model_device: kept as `device`; the work happens where the output states are.

    >>> states, deltas = BaseHiddenStates(), BaseDeltaStates()
    >>> states.mu_a, states.var_a, states.jcb = [0.0], [1.0], [1.0]
    >>> OutputUpdater("cpu").update(states, [1.0], 1.0, deltas)
    >>> deltas.delta_mu, deltas.delta_var
    (array([0.5], dtype=float32), array([-0.5], dtype=float32))
    """

    def __init__(self, model_device: str = "cpu") -> None:
        self.device = model_device
        """Device of the model."""

    @torch.no_grad()
    def update(
        self,
        output_states: BaseHiddenStates,
        mu_obs: ArrayLike,
        var_obs: ArrayLike,
        delta_states: BaseDeltaStates,
    ) -> None:
        """Condition every output on its observation `y ~ N(output, var_obs)`.

        Args:
            output_states: the net's `output_z_buffer`.
            mu_obs: one observation per output; NaN is missing and changes nothing, infinity is
                refused.
            var_obs: noise variance, one number or at least as many as observations.
            delta_states: the net's `input_delta_z_buffer`.
        """
        mean, var, slope = output_states.live.values()
        y = _observations(mu_obs, mean, mean.numel())
        noise = _noise(var_obs, y)
        delta = _conditioned(mean, var, slope, y, noise)
        delta_states.hold(_refusable(delta, y, noise), output_states.block_size)

    @torch.no_grad()
    def update_using_indices(
        self,
        output_states: BaseHiddenStates,
        mu_obs: ArrayLike,
        var_obs: ArrayLike,
        selected_idx: ArrayLike,
        delta_states: BaseDeltaStates,
    ) -> None:
        """Condition some outputs of each sample; the others get no correction.

        Args:
            output_states: the net's `output_z_buffer`.
            mu_obs: the same number of observations for each sample.
            var_obs: noise variance, one number or at least as many as observations.
            selected_idx: which output each observation is of, counted from 1 in its sample.
            delta_states: the net's `input_delta_z_buffer`.
        """
        mean, var, slope = output_states.live.values()
        batch, outputs = max(output_states.block_size, 1), output_states.actual_size
        numbers = to_tensor(selected_idx, torch.device("cpu"), torch.float64).reshape(-1)
        index = integers(numbers, "selected_idx")
        y = _observations(mu_obs, mean, index.numel())
        noise = _noise(var_obs, y)
        if index.numel() % batch:
            raise PartitionError.because(
                f"{index.numel()} indices for {batch} samples",
                f"{index.numel() % batch} left over",
                f"{index.numel()} = {index.numel() // batch}*{batch} + {index.numel() % batch}",
                "the same number of indices for each sample",
            )
        if index.numel() and not bool(((index >= 1) & (index <= outputs)).all()):
            low, high = int(index.min()), int(index.max())
            raise PartitionError.because(
                f"indices from {low} to {high}",
                f"{outputs} outputs per sample",
                f"indices count from 1 to {outputs}",
                f"a last layer of {max(high, 1)} outputs, or indices as label_to_obs gives them",
            )
        index = index.to(mean.device, non_blocking=True)
        rows = torch.arange(batch, device=mean.device).repeat_interleave(index.numel() // batch)
        at = rows * outputs + index - 1
        chosen = _refusable(_conditioned(mean[at], var[at], slope[at], y, noise), y, noise)
        delta = Delta(torch.zeros_like(mean), torch.zeros_like(mean))
        delta.mean[at] = chosen.mean
        delta.var[at] = chosen.var
        delta_states.hold(delta, output_states.block_size)

    @torch.no_grad()
    def update_heteros(
        self,
        output_states: BaseHiddenStates,
        mu_obs: ArrayLike,
        delta_states: BaseDeltaStates,
    ) -> None:
        """Condition a net that tells its own noise: outputs are pairs (mean, noise variance).

        Args:
            output_states: the net's `output_z_buffer`, behind `EvenExp`.
            mu_obs: one observation per pair; NaN or infinity is missing.
            delta_states: the net's `input_delta_z_buffer`.
        """
        mean, var, slope = output_states.live.values()
        outputs = output_states.actual_size
        if outputs % 2:
            raise PartitionError.because(
                "update_heteros reads pairs (mean, noise variance)",
                f"{outputs} outputs per sample",
                f"{outputs} % 2 = 1",
                "a last layer of 2 outputs for each target, then EvenExp()",
            )
        m, v, slope_m = mean[0::2], var[0::2], slope[0::2]
        noise, noise_var, slope_n = mean[1::2], var[1::2], slope[1::2]
        y = _observations(mu_obs, mean, m.numel(), finite=False)
        y = torch.where(torch.isfinite(y), y, torch.nan)
        of_mean = _conditioned(m, v, slope_m, y, noise)
        total = v + noise
        error = noise / total * (y - m)
        error_var = noise - noise * noise / total
        square = error * error + error_var
        square_var = 2 * error_var**2 + 4 * error_var * error * error
        prior = 3 * noise_var + 2 * noise * noise
        gain = slope_n / noise_var
        gain = torch.where(torch.isfinite(gain), gain, 0.0) * noise_var / prior
        of_noise = Delta(gain * (square - noise), gain * gain * (square_var - prior))
        delta = Delta(torch.empty_like(mean), torch.empty_like(mean))
        for whole, first, second in zip(delta, of_mean, of_noise, strict=True):
            whole[0::2] = first
            whole[1::2] = torch.where(torch.isfinite(second), second, 0.0)
        delta_states.hold(delta, output_states.block_size)


def _conditioned(mean: Tensor, var: Tensor, slope: Tensor, y: Tensor, noise: Tensor) -> Delta:
    gain = slope / (var + noise)
    known = torch.isfinite(gain) & ~torch.isnan(y)
    delta = gain * (y - mean)
    return Delta(torch.where(known, delta, 0.0), torch.where(known, -gain * slope, 0.0))


def _refusable(delta: Delta, y: Tensor, noise: Tensor) -> Delta:
    """Return NaN for bad values that are on an accelerator: `backward` refuses it.

    The host looks at values that it has before they go there, and does not wait for others.
    """
    if not is_accelerator(y.device):
        return delta
    bad = torch.isinf(y).any() | ~(noise >= 0).all()
    return Delta(*(t.masked_fill(bad, torch.nan) for t in delta))


def _observations(data: ArrayLike, like: Tensor, count: int, *, finite: bool = True) -> Tensor:
    """Return one observation per output to condition; NaN is missing."""

    def check(values: Tensor) -> None:
        hint = "a missing observation is float('nan')"
        check_finite(values.reshape(-1), "mu_obs", hint, missing=True)

    y = to_tensor(data, like.device, like.dtype, check if finite else None).reshape(-1)
    hint = f"{count} observations, one per output; a missing one is float('nan')"
    if not count:
        hint = "net(x) before update(): no batch has gone through the net yet"
    check_count(f"{y.numel()} observations", y.numel(), count, hint)
    return y


def _noise(data: ArrayLike, y: Tensor) -> Tensor:

    def check(values: Tensor) -> None:
        check_variance(values.reshape(-1)[: y.numel()], "var_obs")

    noise = to_tensor(data, y.device, y.dtype, check).reshape(-1)
    if noise.numel() == 1 and y.numel() != 1:
        noise = noise.expand(y.numel())
    elif noise.numel() < y.numel():
        request, wrong = f"var_obs of {noise.numel()} numbers", f"{noise.numel()} < {y.numel()}"
        hint = "one number for all, or one per observation"
        raise PartitionError.because(request, arithmetic=wrong, hint=hint)
    return noise[: y.numel()]

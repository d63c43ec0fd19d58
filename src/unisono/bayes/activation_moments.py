"""Moments of activated Gaussians: pure functions `(mean, var) -> (mean, var, slope)`.

`slope` is `Cov(z, a) / Var(z)`. First-order functions keep the value at the mean; mixtures and
log-normals are exact moments of the (bounded) function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Activated = tuple[Tensor, Tensor, Tensor]

LEAST = 1e-6
"""Smallest mean and variance that an exact moment is given."""
_TINY = 1e-12
_LARGEST_LOG = 40.0
"""Variance of a logarithm above which log-normal moments would leave float32."""
_ROOT_TWO_PI = math.sqrt(2 * math.pi)


def normal_cdf(x: Tensor) -> Tensor:
    """Return the standard normal distribution function."""
    return torch.special.ndtr(x)


def normal_pdf(x: Tensor) -> Tensor:
    """Return the standard normal density."""
    return torch.exp(-0.5 * x * x) / _ROOT_TWO_PI


def relu(mean: Tensor, var: Tensor) -> Activated:
    """First order at the mean."""
    slope = (mean > 0).to(mean.dtype)
    return mean.clamp_min(0), slope * var, slope


def sigmoid(mean: Tensor, var: Tensor) -> Activated:
    """First order at the mean."""
    value = torch.sigmoid(mean)
    slope = value * (1 - value)
    return value, slope * slope * var, slope


def tanh(mean: Tensor, var: Tensor) -> Activated:
    """First order at the mean."""
    value = torch.tanh(mean)
    slope = 1 - value * value
    return value, slope * slope * var, slope


def softplus(mean: Tensor, var: Tensor) -> Activated:
    """First order at the mean."""
    slope = torch.sigmoid(mean)
    return torch.nn.functional.softplus(mean), slope * slope * var, slope


def leaky_relu(mean: Tensor, var: Tensor) -> Activated:
    """Slope 1 above zero, 0.1 below."""
    slope = torch.where(mean > 0, 1.0, 0.1).to(mean.dtype)
    return slope * mean, slope * slope * var, slope


def mixture_relu(mean: Tensor, var: Tensor) -> Activated:
    """Exact moments of `max(0, z)`."""
    s = var.sqrt()
    a = mean / s.clamp_min(_TINY)
    cdf, pdf = normal_cdf(a), normal_pdf(a)
    t = mean * cdf + s * pdf
    # the variance E[z+^2] - t^2 in units of s, written so that nothing large cancels
    far = a.abs().clamp_max(100.0)
    beyond = pdf - far * normal_cdf(-far)
    second = var * (cdf - beyond * (far + beyond))
    return t.clamp_min(LEAST), second.clamp_min(LEAST), cdf


def mixture_tanh(mean: Tensor, var: Tensor) -> Activated:
    """Exact moments of `max(-1, min(1, z))`."""
    s = var.sqrt()
    wide = s.clamp_min(_TINY)
    low, high = (1 + mean) / wide, (1 - mean) / wide
    cdf_l, cdf_u = normal_cdf(low), normal_cdf(high)
    pdf_l, pdf_u = normal_pdf(low), normal_pdf(high)
    t = (mean + 1) * cdf_l + (mean - 1) * cdf_u + s * (pdf_l - pdf_u) - mean
    square = mean * mean
    second = (
        cdf_l * (var - square - 2 * mean - 1)
        + cdf_u * (var - square + 2 * mean - 1)
        + s * (pdf_u * (mean - 1) - pdf_l * (mean + 1))
        - t * t
        + 2 * t * mean
        + square
        - var
        + 2
    )
    return t, second.clamp_min(LEAST), cdf_l + cdf_u - 1


def mixture_sigmoid(mean: Tensor, var: Tensor) -> Activated:
    """`mixture_tanh`, moved into 0 to 1."""
    t, second, slope = mixture_tanh(mean, var)
    return t / 2 + 0.5, second / 4, slope / 2


def softmax(mean: Tensor, var: Tensor) -> Activated:
    """First order along the last dim, inputs independent."""
    p = torch.softmax(mean, -1)
    weighted = p * p * var
    others = weighted.sum(-1, keepdim=True) - weighted
    slope = p * (1 - p)
    return p, p * p * ((1 - p) ** 2 * var + others), slope


def remax(mean: Tensor, var: Tensor, allowed: Tensor | None = None) -> Activated:
    """Rectified units divided by their sum along the last dim, with log-normal moments.

    `allowed` (broadcast against `mean`) marks the entries that count; the others are exactly 0
    and have no slope.
    """
    m, v, cdf = mixture_relu(mean, var)
    if allowed is not None:
        m, v = m * allowed, v * allowed
    total, total_var = m.sum(-1, keepdim=True), v.sum(-1, keepdim=True)
    if allowed is not None:  # harmless numbers where the result is dropped
        m, v = torch.where(allowed, m, 1.0), torch.where(allowed, v, 1.0)
    log_var = torch.log1p(v / (m * m))
    log_mean = m.log() - log_var / 2
    sum_log_var = torch.log1p(total_var / (total * total))
    sum_log_mean = total.log() - sum_log_var / 2
    cov = torch.log1p(v / (m * total))
    share_var = log_var + sum_log_var - 2 * cov
    a = torch.exp(log_mean - sum_log_mean + share_var / 2).clamp_min(LEAST)
    if allowed is not None:
        a = a * allowed
    a = a / a.sum(-1, keepdim=True)
    out_var = torch.expm1(share_var) * a * a
    covariance = torch.expm1(log_var - cov) * a * m / cdf.clamp_min(1e-30)
    wide = var.clamp_min(_TINY)
    slope = torch.minimum((out_var * var).clamp_min(0).sqrt(), covariance) / wide
    return (a, out_var, slope) if allowed is None else (a, out_var, slope * allowed)


def closed_form_softmax(mean: Tensor, var: Tensor) -> Activated:
    """Log-normal units divided by their sum along the last dim; shares need not add to 1."""
    v = var.clamp_max(_LARGEST_LOG)
    logs = mean + v / 2
    top = logs.amax(-1, keepdim=True)
    share = torch.exp(logs - top)
    total = share.sum(-1, keepdim=True)
    share = share / total
    grown = torch.expm1(v)
    sum_log_var = torch.log1p((share * share * grown).sum(-1, keepdim=True))
    sum_log_mean = top + total.log() - sum_log_var / 2
    cov = torch.log1p(share * grown)
    log_var = v + sum_log_var - 2 * cov
    a = torch.exp(mean - sum_log_mean + log_var / 2)
    part = torch.where(v > _TINY, (v - cov) / v.clamp_min(_TINY), 1 - share)  # its limit at v = 0
    return a, torch.expm1(log_var) * a * a, a * part


def even_exp(mean: Tensor, var: Tensor) -> Activated:
    """Even entries of the last dim as they are, odd ones exponentiated (log-normal moments)."""
    m, v = mean[..., 1::2], var[..., 1::2]
    value = torch.exp(m + v / 2)
    out_mean, out_var, slope = mean.clone(), var.clone(), torch.ones_like(mean)
    out_mean[..., 1::2] = value
    out_var[..., 1::2] = value * value * torch.expm1(v)
    slope[..., 1::2] = value
    return out_mean, out_var, slope

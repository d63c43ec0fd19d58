"""Moments of layers against samples of their Gaussian model."""

from __future__ import annotations

import pytest
import torch
from tests.bayes.nets import condition
from torch.nn import functional as F

from unisono import bayes
from unisono.bayes.moments import Moments

CHUNK = 25_000
SAMPLES = 1_000_000


def drawn(mean, var, n, generator):
    noise = torch.randn(n, *mean.shape, generator=generator, dtype=torch.float64)
    return mean.double() + var.double().sqrt() * noise


def windows(x, w, b, *, pad, stride=1):
    """Convolve each sample with a kernel of its own, as a product of matrices."""
    z = w.flatten(2) @ F.unfold(F.pad(x, pad), w.shape[-1], stride=stride)
    return z + b.unsqueeze(-1)


def spread(x, w, b):
    """Spread each sample with a kernel of its own, stride 2 and padding 1."""
    columns = w.flatten(2).mT @ x.flatten(2)
    sides = [2 * (n - 1) + w.shape[-1] - 2 for n in x.shape[2:]]
    return F.fold(columns, sides, w.shape[-1], stride=2, padding=1) + b[:, :, None, None]


CASES = {
    "linear": (
        lambda: bayes.Linear(3, 2),
        (3,),
        lambda x, w, b: (w @ x.unsqueeze(-1)).squeeze(-1) + b,
    ),
    "conv": (
        lambda: bayes.Conv2d(2, 1, 2, padding=1, in_width=1, in_height=2),
        (2, 2, 1),
        lambda x, w, b: windows(x, w, b, pad=(1, 1, 1, 1)),
    ),
    "conv one-sided": (
        lambda: bayes.Conv2d(1, 1, 2, stride=2, padding=1, padding_type=2, in_width=3, in_height=3),
        (1, 3, 3),
        lambda x, w, b: windows(x, w, b, pad=(0, 1, 0, 1), stride=2),
    ),
    "transposed": (
        lambda: bayes.ConvTranspose2d(1, 2, 3, stride=2, padding=1, in_width=2, in_height=1),
        (1, 1, 2),
        spread,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_has_the_moments_of_its_samples(name):
    make, shape, f = CASES[name]
    generator = torch.Generator().manual_seed(3)
    layer = make()
    layer.plan(shape)
    mean = torch.randn(shape, generator=generator)
    var = torch.rand(shape, generator=generator) + 0.1
    out = layer.forward(Moments(mean[None], var[None]))
    p = layer.params
    sums = [0.0, 0.0, 0.0]
    for _ in range(SAMPLES // CHUNK):
        x = drawn(mean, var, CHUNK, generator)
        w = drawn(p.mean_w, p.var_w, CHUNK, generator)
        b = drawn(p.mean_b, p.var_b, CHUNK, generator)
        z = f(x, w, b)
        centred = z.reshape(CHUNK, *out.mean[0].shape) - out.mean[0].double()
        sums = [s + (centred**k).sum(0) for s, k in zip(sums, (1, 2, 4), strict=True)]
    n = SAMPLES
    first, second, fourth = (s / n for s in sums)
    assert (first.abs() < 4 * (second / n).sqrt()).all()
    assert ((second - out.var[0]).abs() < 4 * ((fourth - second**2) / n).sqrt()).all()


def test_pools_have_the_moments_of_their_samples():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(1, 2, 2, 4, generator=generator)
    var = torch.rand(1, 2, 2, 4, generator=generator)
    pool = bayes.AvgPool2d(2)
    pool.plan((2, 2, 4))
    out = pool.forward(Moments(mean, var))
    assert out.mean.shape == (1, 2, 1, 2)
    z = F.avg_pool2d(drawn(mean[0], var[0], SAMPLES, generator), 2)
    assert ((z.mean(0) - out.mean[0]).abs() < 4 * z.std(0) / len(z) ** 0.5).all()
    assert ((z.var(0) / out.var[0] - 1).abs() < 4 * (2 / len(z)) ** 0.5).all()


def test_the_largest_mean_is_pooled_with_its_variance():
    mean = torch.tensor([[1.0, 5.0, 5.0], [0.0, -1.0, 2.0]]).view(1, 1, 2, 3)
    var = torch.arange(6.0).view(1, 1, 2, 3)
    pool = bayes.MaxPool2d(2)
    pool.plan((1, 2, 3))
    out = pool.forward(Moments(mean, var))
    assert out.mean.flatten().tolist() == [5.0, 5.0]
    assert out.var.flatten().tolist() == [1.0, 1.0]  # the first of the two fives in both windows


@pytest.mark.parametrize("norm", ["batch", "layer", "rms"])
def test_norms_with_fixed_statistics_have_the_moments_of_their_samples(norm):
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(2, 3, generator=generator)
    var = torch.rand(2, 3, generator=generator) + 0.2
    x = Moments(mean, var)
    if norm == "batch":
        layer = bayes.BatchNorm2d(3)
        layer.running_mean, layer.running_var = (
            torch.tensor([0.1, 0.2, 0.3]),
            torch.tensor([0.6, 1.0, 1.4]),
        )
        layer.training = False
        middle, scale = layer.running_mean, (layer.running_var + 1e-5).rsqrt()
    elif norm == "layer":
        layer = bayes.LayerNorm([3])
        middle = mean.mean(1, keepdim=True)
        spread = ((mean - middle).square().sum(1, keepdim=True) + var.sum(1, keepdim=True)) / 2
        scale = (spread + 1e-4).rsqrt()
    else:
        layer = bayes.RMSNorm([3])
        middle, scale = 0.0, (mean.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    p = layer.params
    out = layer.forward(x)
    n = SAMPLES
    z = (drawn(mean, var, n, generator) - middle) * scale
    z = z * drawn(p.mean_w, p.var_w, n, generator)[:, None]
    if layer.bias:
        z = z + drawn(p.mean_b, p.var_b, n, generator)[:, None]
    assert ((z.mean(0) - out.mean).abs().flatten() < 4 * (z.std(0) / n**0.5).flatten()).all()
    square = (z - z.mean(0)).square()
    assert ((square.mean(0) - out.var).abs() < 4 * square.std(0) / n**0.5).all()


def test_one_linear_layer_conditions_as_the_exact_gaussian_does():
    """Weights and bias of one unit are jointly Gaussian with the observation."""
    layer = bayes.Linear(3, 1)
    net = bayes.Sequential(layer).double()
    x = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    prior_mean = torch.cat([layer.params.mean_w[0], layer.params.mean_b]).clone()
    prior_var = torch.cat([layer.params.var_w[0], layer.params.var_b]).clone()
    mean, _ = net(x)
    y, noise = float(mean[0]) + 0.1, 0.7
    condition(net, y, noise)
    h = torch.cat([x, torch.ones(1, dtype=torch.float64)])
    gain = prior_var * h / (h @ (prior_var * h) + noise)
    want_mean = prior_mean + gain * (y - h @ prior_mean)
    want_var = prior_var - gain * h * prior_var
    got = layer.params
    assert torch.allclose(torch.cat([got.mean_w[0], got.mean_b]), want_mean, atol=1e-12)
    assert torch.allclose(torch.cat([got.var_w[0], got.var_b]), want_var, atol=1e-12)

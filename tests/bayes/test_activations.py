"""The moments of activations: printed numbers, composition, and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unisono import bayes
from unisono.bayes.layers.activation import normal_pdf
from unisono.bayes.moments import Moments

TABLE = {
    "ReLU": ([0.5, 0.0], [0.4, 0.0], [1.0, 0.0]),
    "Sigmoid": ([0.622459, 0.425558], [0.022091, 0.011952], None),
    "Tanh": ([0.462117, -0.291313], [0.247400, 0.167495], None),
    "Softplus": ([0.974077, 0.554355], [0.154982, 0.036220], [0.622459, 0.425558]),
    "LeakyReLU": ([0.5, -0.03], [0.4, 0.002], [1.0, 0.1]),
    "MixtureReLU": ([0.577298, 0.067115], [0.269537, 0.025595], [0.785402, 0.251167]),
    "MixtureTanh": ([0.424576, -0.288960], [0.263472, 0.179560], None),
    "MixtureSigmoid": ([0.712288, 0.355520], [0.065868, 0.044890], None),
    "Softmax": ([0.689974, 0.310026], [0.027455, 0.027455], [0.213910, 0.213910]),
    "Remax": ([0.888137, 0.111863], [0.031895, 0.043940], [0.079714, 0.468722]),
    "ClosedFormSoftmax": ([0.667454, 0.344224], [0.016799, 0.043492], [0.167106, 0.237459]),
    "EvenExp": ([0.5, 0.818731], [0.4, 0.148411], [1.0, 0.818731]),
}
X = Moments(torch.tensor([[0.5, -0.3]]), torch.tensor([[0.4, 0.2]]))


@pytest.mark.parametrize("name", TABLE)
def test_an_activation_has_the_printed_moments(name):
    out = getattr(bayes, name)().forward(X)
    for got, want in zip(out, TABLE[name], strict=True):
        if want is not None:
            assert np.allclose(got.numpy(), [want], atol=1.5e-6), name


@pytest.mark.parametrize(
    ("name", "slope"),
    [("Sigmoid", lambda f: f * (1 - f)), ("Tanh", lambda f: 1 - f * f)],
)
def test_a_first_order_slope_is_the_derivative(name, slope):
    out = getattr(bayes, name)().forward(X)
    assert torch.allclose(out.slope, slope(out.mean))
    assert torch.allclose(out.var, out.slope**2 * X.var)


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("MixtureReLU", lambda z: z.clamp_min(0)),
        ("MixtureTanh", lambda z: z.clamp(-1, 1)),
        ("MixtureSigmoid", lambda z: z.clamp(-1, 1) / 2 + 0.5),
        ("EvenExp", lambda z: torch.stack([z[..., 0], z[..., 1].exp()], -1)),
    ],
)
def test_exact_moments_agree_with_sampling(name, f):
    n = 1_000_000
    noise = torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z = X.mean.double() + X.var.double().sqrt() * noise
    a = f(z)
    out = getattr(bayes, name)().forward(Moments(X.mean.double(), X.var.double()))
    assert ((a.mean(0) - out.mean).abs() < 4 * a.std(0) / n**0.5).all()
    centred = a - a.mean(0)
    assert ((centred.square().mean(0) - out.var).abs() < 4 * centred.square().std(0) / n**0.5).all()
    product = centred * (z - z.mean(0)) / X.var
    assert ((product.mean(0) - out.slope).abs() < 4 * product.std(0) / n**0.5).all()


@pytest.mark.parametrize("name", ["Softmax", "Remax", "ClosedFormSoftmax"])
def test_rows_do_not_mix_and_images_are_rows(name):
    mean = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    var = torch.rand(3, 2, 2, 2, generator=torch.Generator().manual_seed(1)) + 0.1
    layer = getattr(bayes, name)()
    whole = layer.forward(Moments(mean, var))
    for n in range(3):
        alone = layer.forward(Moments(mean[n : n + 1], var[n : n + 1]))
        assert torch.allclose(whole.mean[n], alone.mean[0], atol=1e-6)
        assert torch.allclose(whole.slope[n], alone.slope[0], atol=1e-6)
    assert whole.mean.shape == mean.shape
    if name != "ClosedFormSoftmax":
        assert torch.allclose(whole.mean.flatten(1).sum(1), torch.ones(3), atol=1e-5)


@pytest.mark.parametrize("name", ["Softmax", "Remax", "ClosedFormSoftmax"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_extreme_rows_stay_finite(name, scale):
    mean = torch.tensor([[1.0, -2.0, 0.5, 0.0]]) * scale
    out = getattr(bayes, name)().forward(Moments(mean, torch.full_like(mean, min(scale, 30.0))))
    assert all(torch.isfinite(t).all() for t in out)


@pytest.mark.parametrize("name", TABLE)
def test_a_certain_input_gives_finite_numbers(name):
    mean = torch.tensor([[0.5, -0.3, 0.0, 2.0], [60.0, 60.0, -60.0, 60.0]])
    for out in (Moments(mean), Moments(mean, torch.zeros_like(mean))):
        out = getattr(bayes, name)().forward(out)
        assert torch.isfinite(out.mean).all()
        assert torch.isfinite(out.slope).all()
        assert torch.isfinite(out.spread()).all()


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_variance_is_negative(name, dtype):
    generator = torch.Generator().manual_seed(0)
    for units in (1, 2, 6):
        if name == "EvenExp" and units == 1:
            continue
        mean = torch.randn(300, units, generator=generator, dtype=dtype)
        var = torch.rand(300, units, generator=generator, dtype=dtype)
        for m, v in ((0.1, 1), (20, 1), (20, 1e-6), (100, 1e5), (1000, 1e5), (1e6, 1e3)):
            out = getattr(bayes, name)().forward(Moments(m * mean, v * var))
            assert (out.var >= 0).all(), (units, m, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_unit_that_is_cut_has_the_moments_of_an_integral_near_the_cuts_and_far_away(dtype):
    steps = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    weight = normal_pdf(steps)
    weight /= weight.sum()
    for m in (-1000.0, -50.0, -2.0, -1.0, 0.0, 0.3, 0.99, 5.0, 50.0):
        for v in (0.0, 1e-4, 0.1, 1.0, 30.0, 1e3, 1e5, 1e12):
            z = m + v**0.5 * steps
            cut = z.clamp(-1, 1)
            mean = (weight * cut).sum()
            var = (weight * (cut - mean).square()).sum().clamp_min(1e-6)
            at = torch.tensor([m], dtype=dtype), torch.tensor([v], dtype=dtype)
            got = bayes.MixtureTanh._moments(*at)
            assert torch.allclose(got[0].double(), mean, atol=1e-4), (m, v)
            assert torch.allclose(got[1].double(), var, rtol=2e-3, atol=2e-7), (m, v)
            if v:
                slope = (weight * cut * steps).sum() / v**0.5
                assert torch.allclose(got[2].double(), slope, atol=3e-5), (m, v)
    forever = bayes.MixtureTanh._moments(torch.zeros(1), torch.tensor([torch.inf]))
    assert [float(t) for t in forever] == [0.0, 1.0, 0.0]


def test_masked_entries_of_remax_are_exactly_zero():
    mean, var = torch.randn(2, 4), torch.rand(2, 4) + 0.1
    allowed = torch.tensor([True, True, False, True])
    a, v, slope = bayes.Remax._moments(mean, var, allowed)
    kept = bayes.Remax._moments(mean[:, [0, 1, 3]], var[:, [0, 1, 3]])
    assert (a[:, 2] == 0).all()
    assert (v[:, 2] == 0).all()
    assert (slope[:, 2] == 0).all()
    for masked, plain in zip((a, v, slope), kept, strict=True):
        assert torch.allclose(masked[:, [0, 1, 3]], plain)


def test_two_activations_in_a_row_compose():
    both = bayes.Tanh().forward(bayes.Sigmoid().forward(X))
    first = bayes.Sigmoid().forward(X)
    second = bayes.Tanh().forward(Moments(first.mean, first.var))
    assert torch.allclose(both.slope, first.slope * second.slope)


def test_the_variance_of_a_rectified_unit_far_above_zero_is_its_own():
    mean = torch.tensor([10.0, 30.0, 100.0, 1000.0, 1e30, 3.0])
    var = torch.tensor([0.01, 0.01, 0.01, 0.01, 2.0, 0.01])
    assert torch.allclose(bayes.MixtureReLU._moments(mean, var)[1], var, rtol=1e-6)


def test_the_variance_of_a_rectified_unit_is_the_printed_formula():
    generator = torch.Generator().manual_seed(0)
    m = 3 * torch.randn(1000, generator=generator, dtype=torch.float64)
    v = 4 * torch.rand(1000, generator=generator, dtype=torch.float64) + 1e-3
    s = v.sqrt()
    cdf, pdf = torch.special.ndtr(m / s), normal_pdf(m / s)
    t = m * cdf + s * pdf
    want = (-t * t + 2 * t * m - m * s * pdf + (v - m * m) * cdf).clamp_min(1e-6)
    assert torch.allclose(bayes.MixtureReLU._moments(m, v)[1], want, rtol=1e-10, atol=1e-13)


def test_the_slope_of_a_log_normal_softmax_goes_over_into_that_of_certain_units():
    mean = torch.tensor([[0.5, -0.3, 1.0]], dtype=torch.float64)
    at_zero, near = (
        bayes.ClosedFormSoftmax._moments(mean, torch.full_like(mean, v))[2] for v in (0.0, 1e-7)
    )
    p = torch.softmax(mean, -1)
    assert torch.allclose(at_zero, p * (1 - p), atol=1e-12)
    assert torch.allclose(near, at_zero, atol=1e-6)

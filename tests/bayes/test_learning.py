"""Real data: errors and error bars after five epochs, mean over five seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from tests.bayes.nets import trained
from torch import nn

from unisono.bayes import (
    AvgPool2d,
    Conv2d,
    HRCSoftmaxMetric,
    Linear,
    Normalizer,
    OutputUpdater,
    ReLU,
    Remax,
    Sequential,
    Utils,
    batches,
    manual_seed,
    metric,
)

SEEDS = range(5)
NOISE = 0.7**2


@pytest.fixture(scope="module")
def diabetes():
    x, y = load_diabetes(return_X_y=True, scaled=False)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    x = Normalizer.standardize(x, *Normalizer.compute_mean_std(x[:350])).astype(np.float32)
    scale = Normalizer.compute_mean_std(y[:350])
    return x, Normalizer.standardize(y, *scale).astype(np.float32), y, scale


def fit_bayesian(seed, x, y):
    """Return what is predicted after five epochs, and after eight."""
    manual_seed(seed)
    net = Sequential(Linear(10, 50), ReLU(), Linear(50, 1))
    found = []
    for epoch in range(8):
        for a, b in batches(x[:350], y[:350], 10, seed=seed, epoch=epoch):
            trained(net, a, b, NOISE)
        if epoch in (4, 7):
            mean, std = net.predict(x[350:440])
            found.append((mean[:, 0], np.sqrt(std[:, 0] ** 2 + NOISE)))
    return found


def fit_plain(seed, x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, targets = torch.tensor(x[:350]), torch.tensor(y[:350])
    for epoch in range(30):
        for a, b in batches(inputs, targets, 10, seed=seed, epoch=epoch):
            optimizer.zero_grad()
            (model(a)[:, 0] - b).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        return model(torch.tensor(x[350:440]))[:, 0].numpy()


@pytest.mark.timeout(300)
def test_diabetes_is_learnt_as_well_as_by_adam_and_intervals_hold(diabetes):
    x, y, raw, scale = diabetes
    test = raw[350:440]
    found = []
    compared = []
    for seed in SEEDS:
        (mean, std), (longer, _) = fit_bayesian(seed, x, y)
        mean = Normalizer.unstandardize(mean, *scale)
        std = Normalizer.unstandardize_std(std, scale[1])
        found.append(
            (
                metric.rmse(mean, test),
                metric.log_likelihood(mean, test, std),
                metric.coverage(mean, std, test, 0.9),
            )
        )
        pair = (longer, fit_plain(seed, x, y))
        compared.append([metric.rmse(Normalizer.unstandardize(m, *scale), test) for m in pair])
    error, likelihood, covered = np.mean(found, axis=0)
    longer, adam = np.mean(compared, axis=0)
    print(f"RMSE {error:.2f}, log-likelihood {likelihood:.3f}, {covered:.1%} inside 90% intervals")
    print(f"RMSE {longer:.2f} after 8 epochs, {adam:.2f} with Adam after 30")
    assert error <= 58.5
    assert likelihood >= -5.50
    assert longer <= 1.03 * adam
    assert 0.84 <= covered <= 0.96


NETS = {
    "hierarchical": (lambda: Sequential(Linear(64, 100), ReLU(), Linear(100, 11)), 0.04),
    "convolution": (
        lambda: Sequential(
            Conv2d(1, 16, 3, padding=1, in_width=8, in_height=8),
            ReLU(),
            AvgPool2d(2, 2),
            Linear(256, 64),
            ReLU(),
            Linear(64, 11),
        ),
        0.05,
    ),
    "remax": (lambda: Sequential(Linear(64, 100), ReLU(), Linear(100, 10), Remax()), 0.04),
}


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x[order] / 16).astype(np.float32), y[order]


def error_on_digits(build, one_hot, seed, x, y):
    manual_seed(seed)
    net, tools = build(), Utils()
    updater = OutputUpdater(net.device)
    for epoch in range(5):
        for a, b in batches(x[:1424], y[:1424], 16, seed=seed, epoch=epoch):
            net(a)
            z, delta = net.output_z_buffer, net.input_delta_z_buffer
            if one_hot:
                updater.update(z, tools.label_to_one_hot(b, 10), 0.01, delta)
            else:
                obs, idx, _ = tools.label_to_obs(b, 10)
                updater.update_using_indices(z, obs, 1.0, idx, delta)
            net.backward()
            net.step()
    net.eval()
    mean, var = net(x[1424:1792])
    if one_hot:
        return metric.classification_error(mean.reshape(-1, 10).argmax(1), y[1424:1792])
    return HRCSoftmaxMetric(10).error_rate(mean, var, y[1424:1792])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NETS)
def test_digits_are_learnt(name, digits):
    build, gate = NETS[name]
    errors = [error_on_digits(build, name == "remax", seed, *digits) for seed in SEEDS]
    print(f"{name}: {np.mean(errors):.2%}")
    assert np.mean(errors) <= gate

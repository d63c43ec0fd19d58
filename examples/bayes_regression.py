"""A curve with a gap in its data: the error band widens where nothing was seen.

    python examples/bayes_regression.py

Writes bayes_regression.png if matplotlib is there (`pip install "unisono[plot]"`).
"""

from __future__ import annotations

import numpy as np

from unisono.bayes import (
    Linear,
    OutputUpdater,
    ReLU,
    Sequential,
    batches,
    exponential_scheduler,
    manual_seed,
    metric,
)

NOISE = 0.05


def truth(x):
    return np.sin(2.2 * x) + 0.2 * x


def observed(rng):
    x = np.concatenate([rng.uniform(-1.6, 0.4, 80), rng.uniform(1.4, 2.0, 40)])
    return x.astype(np.float32), (truth(x) + NOISE * rng.normal(size=120)).astype(np.float32)


def train(x, y, epochs=40):
    manual_seed(1)
    hidden = [layer for _ in range(2) for layer in (Linear(50, 50), ReLU())]
    net = Sequential(Linear(1, 50), ReLU(), *hidden, Linear(50, 1))
    updater = OutputUpdater(net.device)
    for epoch in range(epochs):
        noise = exponential_scheduler(0.5, NOISE, 0.9, epoch)
        for a, b in batches(x, y, 10, epoch=epoch):
            net(a)
            updater.update(net.output_z_buffer, b, noise**2, net.input_delta_z_buffer)
            net.backward()
            net.step()
    return net


def plot(x, y, grid, mean, std):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(grid, mean - 2 * std, mean + 2 * std, alpha=0.3, label="mean +- 2 std")
    axes.plot(grid, mean, label="mean")
    axes.plot(grid, truth(grid), "k--", lw=1, label="truth")
    axes.plot(x, y, "k.", ms=4, label="observed")
    axes.set(xlabel="x", ylabel="y", title="The band widens where data is missing")
    axes.legend()
    figure.savefig("bayes_regression.png", dpi=120)
    print("wrote bayes_regression.png")


def main():
    x, y = observed(np.random.default_rng(0))
    net = train(x, y)
    grid = np.linspace(-1.7, 2.4, 206).astype(np.float32)
    mean, std = (part[:, 0] for part in net.predict(grid[:, None]))
    seen = ((grid > -1.6) & (grid < 0.4)) | ((grid > 1.4) & (grid < 2.0))
    gap = (grid > 0.6) & (grid < 1.2)
    error = metric.rmse(mean[seen], truth(grid[seen]))
    print(f"error where data is {error:.3f}")
    print(f"std where data is {std[seen].mean():.3f}, in the gap {std[gap].mean():.3f}")
    assert error < 0.15
    assert std[gap].mean() > 1.3 * std[seen].mean()
    plot(x, y, grid, mean, np.sqrt(std**2 + NOISE**2))


main()

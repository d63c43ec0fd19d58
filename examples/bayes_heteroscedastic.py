"""Noise that depends on x: the net learns the mean and the noise together.

    python examples/bayes_heteroscedastic.py

Two outputs a target: a mean, and through EvenExp a noise variance. `update_heteros` needs no
observation variance: the net tells it. Writes bayes_heteroscedastic.png if matplotlib is there.
"""

from __future__ import annotations

import numpy as np

from unisono.bayes import (
    EvenExp,
    Linear,
    OutputUpdater,
    ReLU,
    Sequential,
    batches,
    manual_seed,
    metric,
)


def truth(x):
    return x**3 - 0.5 * x, 0.03 + 0.35 * (x + 1) / 2


def train(x, y, epochs=20):
    manual_seed(0)
    net = Sequential(
        Linear(1, 64, gain_weight=0.5, gain_bias=0.5),
        ReLU(),
        Linear(64, 64, gain_weight=0.5, gain_bias=0.5),
        ReLU(),
        Linear(64, 2, gain_weight=0.2, gain_bias=0.2),
        EvenExp(),
    )
    updater = OutputUpdater(net.device)
    for epoch in range(epochs):
        for a, b in batches(x, y, 10, epoch=epoch):
            net(a)
            updater.update_heteros(net.output_z_buffer, b, net.input_delta_z_buffer)
            net.backward()
            net.step()
    return net


def plot(x, y, grid, mean, total):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    middle, noise = truth(grid)
    axes.plot(x, y, "k.", ms=2, alpha=0.4, label="observed")
    axes.fill_between(grid, mean - 2 * total, mean + 2 * total, alpha=0.3, label="learnt +- 2 std")
    axes.plot(grid, mean, label="learnt mean")
    for sign in (-2, 2):
        axes.plot(
            grid, middle + sign * noise, "k--", lw=1, label="true +- 2 std" if sign > 0 else None
        )
    axes.set(xlabel="x", ylabel="y", title="Noise that grows with x")
    axes.legend()
    figure.savefig("bayes_heteroscedastic.png", dpi=120)
    print("wrote bayes_heteroscedastic.png")


def main():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 600).astype(np.float32)
    middle, noise = truth(x)
    y = (middle + noise * rng.normal(size=600)).astype(np.float32)
    net = train(x, y)
    net.eval()
    grid = np.linspace(-1, 1, 101).astype(np.float32)
    mean, var = (part.reshape(-1, 2) for part in net(grid[:, None]))
    total = np.sqrt(var[:, 0] + mean[:, 1])  # of the mean, and of the noise
    quiet, loud = np.sqrt(mean[:20, 1]).mean(), np.sqrt(mean[-20:, 1]).mean()
    print(f"learnt noise at the left {quiet:.3f} (true {truth(grid)[1][:20].mean():.3f}), ", end="")
    print(f"at the right {loud:.3f} (true {truth(grid)[1][-20:].mean():.3f})")
    fresh = truth(grid)[0] + truth(grid)[1] * rng.normal(size=(200, 101))
    covered = metric.coverage(mean[:, 0] + 0 * fresh, total + 0 * fresh, fresh, 0.9)
    print(f"90% intervals hold {covered:.1%} of new observations")
    assert loud > 1.5 * quiet
    plot(x, y, grid, mean[:, 0], total)


main()

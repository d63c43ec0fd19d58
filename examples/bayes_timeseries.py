"""One-step forecast of a noisy series by a Bayesian LSTM, with its band.

    python examples/bayes_timeseries.py

Writes bayes_timeseries.png if matplotlib is there.
"""

from __future__ import annotations

import numpy as np

from unisono.bayes import (
    LSTM,
    Linear,
    Normalizer,
    OutputUpdater,
    Sequential,
    Utils,
    batches,
    exponential_scheduler,
    manual_seed,
    metric,
)

WINDOW, TRAIN, NOISE = 16, 500, 0.15


def series(n=680):
    t = np.arange(n)
    wave = np.sin(2 * np.pi * t / 24) + 0.5 * np.sin(2 * np.pi * t / 60 + 1)
    return (10 + 3 * wave + 0.3 * np.random.default_rng(0).normal(size=n)).astype(np.float32)


def train(x, y, epochs=8):
    manual_seed(0)
    net = Sequential(LSTM(1, 10, WINDOW), LSTM(10, 10, WINDOW), Linear(10 * WINDOW, 1))
    updater = OutputUpdater(net.device)
    for epoch in range(epochs):
        noise = exponential_scheduler(1.0, NOISE, 0.8, epoch)
        for a, b in batches(x, y, 16, epoch=epoch):
            net(a)
            updater.update(net.output_z_buffer, b, noise**2, net.input_delta_z_buffer)
            net.backward()
            net.step()
    return net


def plot(time, truth, mean, std):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(time, mean - 2 * std, mean + 2 * std, alpha=0.3, label="forecast +- 2 std")
    axes.plot(time, mean, label="one-step forecast")
    axes.plot(time, truth, "k.", ms=4, label="observed")
    axes.set(xlabel="time", title="Forecast of steps the net has not seen")
    axes.legend()
    figure.savefig("bayes_timeseries.png", dpi=120)
    print("wrote bayes_timeseries.png")


def main():
    data = series()
    mu, scale = Normalizer.compute_mean_std(data[:TRAIN])
    unit = Normalizer.standardize(data, mu, scale)
    x, y = Utils().create_rolling_window(unit, [0], WINDOW, 1, 1, 1)
    cut = TRAIN - WINDOW
    net = train(x[:cut], y[:cut])
    mean, std = (part[:, 0] for part in net.predict(x[cut:]))
    std = np.sqrt(std**2 + NOISE**2)
    mean, std = Normalizer.unstandardize(mean, mu, scale), Normalizer.unstandardize_std(std, scale)
    truth = data[TRAIN : TRAIN + len(mean)]
    error, lazy = metric.rmse(mean, truth), metric.rmse(data[TRAIN - 1 :][: len(mean)], truth)
    print(f"forecast error {error:.2f}; repeating the last value: {lazy:.2f}")
    print(f"90% intervals hold {metric.coverage(mean, std, truth, 0.9):.1%}")
    assert error < lazy
    plot(np.arange(TRAIN, TRAIN + len(mean)), truth, mean, std)


main()

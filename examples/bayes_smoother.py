"""A series with missing values, filtered step by step online, then smoothed and filled.

    python examples/bayes_smoother.py

SLSTM layers see one step a call (online learning, batch 1) and remember every step; `smoother()`
goes back over them with what was learnt later. Writes bayes_smoother.png if matplotlib is there.
"""

from __future__ import annotations

import numpy as np

from unisono.bayes import SLSTM, OutputUpdater, Sequential, SLinear, manual_seed, metric

STEPS, NOISE = 200, 0.1


def observed(rng):
    truth = np.sin(2 * np.pi * np.arange(STEPS + 1) / 25)
    y = truth + NOISE * rng.normal(size=STEPS + 1)
    y[120:132] = np.nan  # a gap
    y[rng.integers(20, STEPS, 15)] = np.nan  # and single misses
    return truth.astype(np.float32), y.astype(np.float32)


def one_pass(net, y, noise):
    """Walk over the series; a missing input is replaced by its own forecast."""
    updater = OutputUpdater(net.device)
    means, variances = [], []
    x, var_x = y[0], 0.0
    for target in y[1:]:
        mean, var = net(np.array([x]), np.array([var_x]))
        means.append(float(mean[0]))
        variances.append(float(var[0]))
        updater.update(net.output_z_buffer, [target], noise**2, net.input_delta_z_buffer)
        net.backward()
        net.step()
        x, var_x = (float(mean[0]), float(var[0])) if np.isnan(target) else (target, noise**2)
    return np.array(means), np.array(variances)


def plot(truth, y, mean, std):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.add_subplot()
    time = np.arange(1, STEPS + 1)
    axes.axvspan(120, 131, color="0.92", label="missing")
    axes.fill_between(time, mean - 2 * std, mean + 2 * std, alpha=0.3, label="smoothed +- 2 std")
    axes.plot(time, mean, label="smoothed")
    axes.plot(time, truth[1:], "k--", lw=1, label="truth")
    axes.plot(time, y[1:], "k.", ms=4, label="observed")
    axes.set(xlabel="time", title="Missing values, filled with an error bar", ylim=(-2.0, 1.5))
    axes.legend(loc="lower center", ncols=5, fontsize=8)
    figure.savefig("bayes_smoother.png", dpi=120)
    print("wrote bayes_smoother.png")


def main():
    truth, y = observed(np.random.default_rng(0))
    manual_seed(2)
    net = Sequential(SLSTM(1, 12, 1), SLinear(12, 1))
    for epoch in range(5):
        one_pass(net, y, max(NOISE, 0.6 * 0.75**epoch))
        mean, var = net.smoother()
    std = np.sqrt(np.maximum(var, 0) + NOISE**2)
    gap = np.isnan(y[1:])
    print(f"{gap.sum()} of {STEPS} values were missing")
    print(f"error where observed {metric.rmse(mean[~gap], truth[1:][~gap]):.3f}, ", end="")
    print(f"where missing {metric.rmse(mean[gap], truth[1:][gap]):.3f}")
    assert metric.rmse(mean[~gap], truth[1:][~gap]) < 0.5
    plot(truth, y, mean, std)


main()
